"""Adapters that drive other projects' SCAFFOLD through the conformance suite.

Each module runs in an environment that has its project, and calls the project's own client and
server classes; what is replaced (networks, data sets, evaluation) is said in its docstring.
"""
