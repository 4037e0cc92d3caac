"""The one error that keepset raises for input it cannot take."""


class KeepsetError(ValueError):
    """Bad input or an unsupported combination: one sentence that says what is wrong and what is allowed.

    The command line prints it without a trace-back and exits with 2.
    """
