"""Time to accuracy over shaped links, and the replay of byte counts over them: `gradwire race` and `gradwire replay`.

race_methods (what may race)  ->  contest (which runs there are)  ->  race_runner: one lab a run, watched through events
contestant is where a host of a race begins; race_files and plot: what is kept
trace (bytes of a run)  ->  replay (which steps)  ->  player, where a host of a replay begins
"""
