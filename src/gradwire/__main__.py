"""`python -m gradwire`: the command line, and what torchrun starts in every worker."""

from gradwire.tools.cli import app

if __name__ == "__main__":
    app(prog_name="gradwire")
