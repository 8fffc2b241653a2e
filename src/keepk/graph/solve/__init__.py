"""From facts about atoms to classes of atoms that have to be removed together."""
