"""The ready training runs behind `gradwire train` and `gradwire demo`.

tasks (what is learned)  ->  loop (how)  ->  run_checkpoint, metrics, reporter (what is kept and shown)
launch starts the workers; worker_process is where each of them begins, worker_group what they do together.
"""
