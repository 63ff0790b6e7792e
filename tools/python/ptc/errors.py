"""What ptcfs refuses, with its own reason: the text that the daemon wrote of it."""


class PtcError(Exception):
    """Something that ptcfs refused, or that failed."""


class CommitError(PtcError):
    """A checkpoint that cannot be committed; the text of `incoming/<name>.error`. Nothing is lost: mend and commit
    again.
    """


class LayoutError(PtcError):
    """A layout.json that was refused: line, column and reason. The one before stays."""


class ReshardError(PtcError):
    """A change of layout that failed; the layout in force is still the one before."""
