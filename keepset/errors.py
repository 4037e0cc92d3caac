"""The errors that keepset raises for input it cannot take, told apart so that a service can answer each its way."""


class KeepsetError(ValueError):
    """Bad input or an unsupported combination: one sentence that says what is wrong and what is allowed.

    The command line prints it without a trace-back and exits with 2. Every other error of keepset's is one of these;
    raised as it is, it speaks of an argument that is none of what the others are about.
    """


class RecipeError(KeepsetError):
    """A recipe's text, a method's name or a parameter that cannot be, or methods that do not go together."""


class BudgetError(KeepsetError):
    """A budget that cannot be: `keep`, `sinks`, `recent`, or a schedule that they do not suit."""


class UnsupportedModelError(KeepsetError):
    """The model, or what it is called with, is not of a kind that keepset compresses."""


class UnsupportedEngineError(KeepsetError):
    """The engine's version, or its configuration, does not allow what the recipe asks for."""


class CorruptFileError(KeepsetError):
    """A file is damaged, of another format or version, or not what it was taken for."""
