"""What to keep and when: spaces, schedules, phases. Frozen values and plain ints; no module is touched."""
