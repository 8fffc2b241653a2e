"""A shrunk model as files: saved with what was cut, loaded by the user's own constructor and a replay."""
