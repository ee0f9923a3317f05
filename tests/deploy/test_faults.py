"""The scorecard is full, and it can be lost."""

import pytest

from fedscaffold import robust
from fedscaffold.algorithms.round import exchange
from fedscaffold.deploy import (
    aggregation,
    audit,
    client,
    closing,
    errors,
    gate,
    outliers,
    server,
    site_privacy,
)
from fedscaffold.deploy import settings as deploy_settings
from tests import faults

MEASURE = aggregation.measure


def accept_all(filter, algorithm, state, updates):
    return outliers.Findings({}, {site: [1.0, 1.0] for site in updates})


def moves_alone(algorithm):
    """A filter that looks at the moves and not at what makes the c_i."""
    return exchange(algorithm)._replace(vectors=("move",))


def unclipped(update, algorithm, told, most, clip):
    return MEASURE(update, algorithm, told, most)


@pytest.mark.slow
@pytest.mark.parametrize("number", sorted(faults.SCENARIOS))
def test_every_fault_is_survived(number):
    (score,) = faults.scorecard([number])
    assert score.points == 2, score.said


@pytest.mark.parametrize(
    ("number", "where", "mutant"),
    [
        (5, (gate, "check_fresh"), lambda packet, asked: None),
        (6, (gate, "check_fresh"), lambda packet, asked: None),
        (12, (client, "load_record"), lambda folder, expect, initial: initial),
        (13, (client, "load_record"), lambda folder, expect, initial: initial),
        (16, (gate, "check_finite"), lambda name, array: None),
        (8, (server, "save_state"), lambda folder, kept, settings, schema: kept.generation + 1),
        (22, (aggregation, "measure"), unclipped),
        (23, (aggregation, "measure"), unclipped),
        (27, (site_privacy.PrivateSite, "_refuse_beyond"), lambda self, ledger, charge: None),
        (27, (site_privacy, "refuse_older"), lambda ledger, folder: None),
        (29, (aggregation, "find_outsized"), lambda lengths, usual: {}),
        (29, (aggregation, "measure"), lambda update, *_: update),
        (30, (gate, "check_greeting"), lambda packet, *_: packet.facts["records"]),
        (31, (server, "FREE"), 1000),
        (32, (gate, "abbreviate"), repr),
        (33, (audit, "_check_head"), lambda path, events, expected: None),
        (34, (deploy_settings, "RESERVED"), set()),
        (35, (errors, "public_type_of"), str),
        (37, (closing, "find_outliers"), accept_all),
        (38, (robust, "NEAR"), 1e9),
        (39, (outliers, "exchange"), moves_alone),
        (36, (server.Server, "_check_update"), lambda self, site, update, current: update),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_the_scorecard_can_be_lost(number, where, mutant, monkeypatch):
    monkeypatch.setattr(*where, mutant)
    assert faults.scorecard([number])[0].points == 0
