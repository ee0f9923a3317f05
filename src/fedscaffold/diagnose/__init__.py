"""Diagnose a run or a deployed server from its folder."""
