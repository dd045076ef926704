"""The command `gradwire`, `python -m gradwire`, and what torchrun starts in every worker."""

import sys

TOOLS = ("rich", "tomli", "typer")  # of the extra `tools`: nothing else of the package needs them


def main() -> None:
    """The command line, or in one sentence what it needs."""
    try:
        from gradwire.tools.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in TOOLS:
            raise
        sys.exit(f"gradwire: the command line needs {error.name}, which is missing: pip install 'gradwire[tools]'")
    app(prog_name="gradwire")


if __name__ == "__main__":
    main()
