"""Every registered algorithm, deployed, is the NumPy reference; one that cannot be is refused by name with a reason."""

import shutil
from functools import partial
from itertools import product

import numpy as np
import pytest
from cases import sharp
from deploy_case import (
    RECORDS,
    ROUNDS,
    SITES,
    START,
    data,
    deployed_server,
    gradient,
    run_quietly,
    settings,
)
from deploy_case import play as play_quietly

from fedscaffold.algorithms import ALGORITHMS, make
from fedscaffold.algorithms.reference import Federation, begin, descend, play
from fedscaffold.algorithms.round import work_of
from fedscaffold.checks import InputError
from fedscaffold.deploy import InProcess, Server, drive
from fedscaffold.deploy.aggregation import blank_memory, residual
from fedscaffold.deploy.client_state import load_record

REFUSED = {
    "dane": "second exchange",
    "fedexp": "hold numbers beside vectors",
    "mime": "second exchange",
    "scaffnew": "every client in every round",
    "scaffold-xi": "every client in every round",
}
MORE = {
    "scaffold, option 1": "name = 'scaffold'\noption = 1",
    "scaffold, server step": "name = 'scaffold'\nserver_lr = 0.7",
    "fedprox, strong": "name = 'fedprox'\nmu = 0.5",
    "fedbn, all of it": "name = 'fedbn'\nlocal = ['w']",
    "amplified, 3 rounds": "name = 'amplified-scaffold'\nwindow = 3\ngamma = 1.2",
    "amplified, 2 rounds": "name = 'amplified-scaffold'\nwindow = 2\ngamma = 0.8",
}
CASES = {name: f"name = '{name}'" for name in sorted(ALGORITHMS) if name not in REFUSED} | MORE


def remembers(case):
    """Whether clients keep a memory between rounds."""
    return make(**settings(algorithm=CASES[case]).algorithm).has_memory


def slope(i, y):
    return gradient({"w": y}, data(SITES[i]))["w"]


def reference_state(algorithm, config):
    """The state after `ROUNDS`, by the reference engine."""
    lrs = [config.local.lr] * work_of(algorithm, config.local.steps).steps

    def steps(i, start, x, shift):
        return descend(algorithm, partial(slope, i), start, x, shift, lrs=lrs)

    total = sum(RECORDS.values())
    federation = Federation([RECORDS[site] / total for site in SITES], steps, slope)
    state = begin(algorithm, START, len(SITES))
    for present, lost in ROUNDS:
        cohort = [SITES.index(site) for site in present]
        state = play(
            algorithm, state, federation, cohort, [i for i in cohort if SITES[i] not in lost]
        )
    return state


@pytest.mark.parametrize("keeper", ["server", "client"])
@pytest.mark.parametrize("case", CASES)
def test_deployed_is_the_reference(case, keeper, tmp_path):
    deploy = f"state = '{keeper}'\nquorum = 1"
    config = settings(deploy=deploy, algorithm=CASES[case], top="weights = 'records'")
    server = deployed_server(config, tmp_path)
    right = reference_state(server.algorithm, config)
    assert server.state.round == right.round
    for field, value in right.server._asdict().items():
        mine = getattr(server.state.server, field)
        np.testing.assert_allclose(mine, value, rtol=0, atol=1e-12, err_msg=field)
    if keeper == "server" and server.algorithm.has_memory:
        for i, site in enumerate(SITES):
            for field, value in right.memory[i]._asdict().items():
                mine = getattr(server.state.memory[site], field)
                np.testing.assert_allclose(
                    mine, value, rtol=0, atol=1e-12, err_msg=f"{field} of {site}"
                )
    assert server.fault is None


# `test_deployed_is_the_reference` has all, with both keepers: here no memory, control variates, a memory of moves, two models
KINDS = ("fedavg", "scaffold", "feddyn", "ditto", "amplified, 3 rounds")


@pytest.mark.parametrize(
    ("case", "keeper"),
    sharp(product(CASES, ("server", "client")), lambda one: one[0] in KINDS and one[1] == "server"),
)
def test_single_precision_is_the_reference_up_to_rounding(case, keeper, tmp_path):
    config = settings(
        deploy=f"state = '{keeper}'\nquorum = 1", algorithm=CASES[case], top="weights = 'records'"
    )
    server = deployed_server(config._replace(precision="float32"), tmp_path)
    assert server.state.x.dtype == np.float32
    right = reference_state(server.algorithm, config).server
    np.testing.assert_allclose(server.state.x, right.x, rtol=0, atol=1e3 * np.finfo(np.float32).eps)
    assert server.fault is None


@pytest.mark.parametrize("case", [case for case in CASES if remembers(case)])
def test_a_lost_memory_is_replaced_by_a_resync(case, tmp_path):
    """Every other site reports its memory, numbers included; the lost one begins anew; c is their mean again."""
    config = settings(deploy="state = 'client'\nquorum = 1", algorithm=CASES[case])
    server = deployed_server(config, tmp_path)
    shutil.rmtree(tmp_path / "sites" / server.run / "ant")
    kinds = [play_quietly(server, config, tmp_path).kind for _ in range(4)]
    assert kinds.count("resync") == 1
    assert kinds[-1] == "train"
    like = blank_memory(server.algorithm, server.state.x)
    memory = {
        site: load_record(tmp_path / "sites" / server.run / site, member.digest, like)
        for site, member in server.roster.items()
    }
    assert residual(server.algorithm, server.state._replace(memory=memory)) < 1e-12


@pytest.mark.parametrize("case", [case for case in CASES if "amplified" in case])
def test_torch_is_numpy(case, tmp_path):
    """A shift that is a record of vectors and numbers reaches the local steps of a torch model as well."""
    torch = pytest.importorskip("torch")
    from fedscaffold.deploy.torch_client import TorchLearner

    class Point(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(START))

    def loss(module, batch):
        a, b = batch
        return (a * (module.w - b) ** 2).sum(dim=1).mean() / 2

    def tensors(site):
        return tuple(torch.from_numpy(part) for part in data(site))

    config = settings(algorithm=CASES[case])
    one = TorchLearner(Point, loss, tensors, precision="float64")
    theirs = Server(config, one.schema, one.start, tmp_path / "torch", buffers=one.buffers)
    drive(theirs, InProcess(one, config, tmp_path / "torch"), 7)
    mine, _ = run_quietly(config, tmp_path / "numpy", 7)
    np.testing.assert_allclose(theirs.state.x, mine.state.x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_what_is_refused_is_refused_by_name(name):
    if name not in REFUSED:
        assert settings(algorithm=f"name = '{name}'").algorithm["name"] == make(name).name
        return
    with pytest.raises(InputError, match=f"{name} cannot be deployed: .*{REFUSED[name]}") as error:
        settings(algorithm=f"name = '{name}'")
    assert "\n" not in str(error.value)
