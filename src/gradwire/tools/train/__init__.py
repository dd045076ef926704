"""The ready training runs behind `gradwire train` and `gradwire demo`.

tasks (what is learned)  ->  loop (how)  ->  checkpoint, metrics, progress (what is kept and shown)
launch starts the workers; worker is where each of them begins.
"""
