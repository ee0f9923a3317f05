"""Docstrings as Markdown: an example that begins with `>>>` becomes a block of code, not a quotation."""

import re

import griffe

EXAMPLE = re.compile(r"^([ ]*)>>> .*(?:\n(?:\1[ ]*\S.*))*", re.M)


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


class Examples(griffe.Extension):
    """Rewrites every docstring once it is read."""

    def on_object(self, *, obj, **_):
        """Griffe calls this for every module, class, function and attribute."""
        if not obj.is_alias and obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
