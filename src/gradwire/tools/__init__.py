"""Stand apart: the command line, train, experiment, lab, race, plan. Nothing below imports them."""
