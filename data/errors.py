"""Mistakes that a user can mend.

HdtoolError
├── PromptError     a prompt or a file of prompts cannot be used
├── ModelError      no such model, or none that can be loaded
│   └── FamilyError     a model whose kind cannot verify a tree of drafts
├── RecordError     an input of a builder, or a recorded conversation, cannot be used
├── StoreError      a store cannot be opened or written
├── HeadsError      drafting heads cannot be opened, trained or written
├── CostError       what forward passes cost cannot be read or written
├── ResultError     a folder of results cannot be read or written
├── ServeError      the serving engine is not there
├── ClusterError    a cluster cannot be reached, or cannot do what it is asked for
└── OptionError     options that do not go together

Each message says what was wrong, what was found, and what to do next, in one line. The command
line prints it and exits with ``exit_code``; whoever uses hdtool as a library catches it.
"""


def reason_of(error: Exception) -> str:
    """What foreign code complained of, in one line."""
    return str(error).strip().split("\n")[0] or type(error).__name__


class HdtoolError(Exception):
    """Something that the user can mend; the message is shown as it is."""

    exit_code = 1


class PromptError(HdtoolError):
    """A prompt, or a file of prompts, cannot be used."""


class ModelError(HdtoolError):
    """No such model, or none that can be loaded here."""


class FamilyError(ModelError):
    """The model is of a kind that cannot verify a tree of drafts."""


class RecordError(HdtoolError):
    """An input of a builder, or a recorded conversation, cannot be used."""


class StoreError(HdtoolError):
    """A store cannot be opened or written."""


class HeadsError(HdtoolError):
    """Drafting heads cannot be opened, trained or written."""


class CostError(HdtoolError):
    """What forward passes cost cannot be read or written."""


class ResultError(HdtoolError):
    """A folder of results cannot be read or written."""


class ServeError(HdtoolError):
    """The serving engine is not there."""


class ClusterError(HdtoolError):
    """A cluster cannot be reached, or cannot do what it is asked for."""


class OptionError(HdtoolError):
    """Options that do not go together."""

    exit_code = 2
