"""Differential privacy: what is asked for, what it costs, and what has been spent.

`records` says that single records are protected, `clients` that whole clients are; a run takes
either as `privacy=`. `epsilon` is the
accountant: the cost of a number of steps, and `noise_for` the noise that a budget needs.
See docs/privacy.md.
"""

from fedscaffold.privacy.accounting import epsilon, noise_for
from fedscaffold.privacy.clients import Clients, clients
from fedscaffold.privacy.records import Records, records

__all__ = ["Clients", "Records", "clients", "epsilon", "noise_for", "records"]
