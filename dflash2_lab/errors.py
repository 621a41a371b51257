"""The one error type for bad input: its message names the thing, what was found and what fits."""


class LabError(ValueError):
    """Bad input or a bad file; the command line prints the message and exits with code 2."""


def first_line(error: BaseException) -> str:
    """What another library says of its error, without the advice that may follow."""
    return (str(error).strip() or repr(error)).splitlines()[0]
