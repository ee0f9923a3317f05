"""Docstrings as the reference shows them.

Examples that begin with `>>>` become blocks of code. The docstrings of `simulate`, `sweep` and the
estimators hold a line ARGUMENTS or PARAMETERS, which the package replaces at run time by a line for
each argument. Griffe reads the source and does not run it, so these objects are imported here for
their docstring and signature.
"""

import importlib
import inspect
import re

import griffe

EXAMPLE = re.compile(r"^([ ]*)>>> .*(?:\n(?:\1[ ]*\S.*))*", re.M)
FILLED = re.compile(r"^ *(?:ARGUMENTS|PARAMETERS)$", re.M)
DESCRIPTION = (
    "fedscaffold.run_config.RunConfig"  # a dataclass whose defaults are made by a function
)


def fenced(text):
    r"""The text with its examples between fences, the indentation kept.

    >>> print(fenced("Adds.\n\n>>> 1 + 1\n2"))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)


def imported(path):
    """The object at a dotted path, which is a module's attribute.

    >>> imported("fedscaffold.run_config.RunConfig").__name__
    'RunConfig'
    """
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def parameters(live):
    """The parameters of an object's run-time signature, as griffe has them."""
    return griffe.Parameters(
        *(
            griffe.Parameter(
                one.name,
                annotation=None
                if one.annotation is one.empty
                else inspect.formatannotation(one.annotation).strip("'"),
                kind=griffe.ParameterKind[one.kind.name.lower()],
                default=None if one.default is one.empty else repr(one.default),
            )
            for one in inspect.signature(live).parameters.values()
        )
    )


def complete(obj, live):
    """Give a function or class the docstring and the signature that it has at run time."""
    obj.docstring.value = inspect.getdoc(live)
    if obj.is_function:
        obj.parameters = parameters(live)
    else:
        this = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
        init = griffe.Function("__init__", parameters=griffe.Parameters(this, *parameters(live)))
        obj.set_member("__init__", init)


class Docstrings(griffe.Extension):
    """Completes and rewrites every docstring once it is read."""

    def on_object(self, *, obj, **_):
        """Griffe calls this for every module, class, function and attribute."""
        if obj.is_alias or not obj.docstring:
            return
        if FILLED.search(obj.docstring.value) or obj.path == DESCRIPTION:
            complete(obj, imported(obj.path))
        obj.docstring.value = fenced(obj.docstring.value)
