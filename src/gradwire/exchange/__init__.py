"""Step 5, and the order of all: one step over the wire, committed or taken back; over a group or in one process."""
