"""The projects that are judged: where each comes from, how it is driven, what was found in it."""

from __future__ import annotations

from typing import NamedTuple

from fedscaffold.checks import InputError

__all__ = ["PEERS", "Finding", "Peer", "find"]

TORCH = ("torch==2.13.0", "numpy<3")
FL4HEALTH = (
    "torch==2.13.0", "numpy<2", "flwr>=1.18,<1.19", "opacus", "torchmetrics", "tqdm",
)  # fmt: skip


class Finding(NamedTuple):
    """A place in a project's code that explains rows that fail."""

    where: str
    """File of the project, with lines."""
    what: str
    patch: str
    """The smallest change that would mend it, in words."""
    tried: str = ""
    """What the rows say once the change is made; empty if it was not tried."""


class Peer(NamedTuple):
    """A project's SCAFFOLD in one version."""

    name: str
    project: str
    version: str
    """The release, or the commit of the checkout."""
    target: str
    """The adapter, as `module:function`."""
    environment: str
    """Name of its environment, which peers with the same requirements share."""
    requirements: tuple[str, ...]
    alone: tuple[str, ...] = ()
    """Packages that are installed without their dependencies."""
    repository: str = ""
    """`owner/name` where it is judged from a checkout; empty for a package of PyPI."""
    root: str = ""
    """Folder of the checkout that has to be on the path."""
    caveats: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def _adapter(name: str) -> str:
    return f"papers.peers.adapters.{name}"


_ALL = (
    Peer(
        name="fedlab",
        project="FedLab",
        version="1.3.0",
        target=_adapter("fedlab:adapter"),
        environment="fedlab",
        requirements=(*TORCH, "tqdm"),
        alone=("fedlab==1.3.0",),
        caveats=("Installed without torchvision and plotting packages, which are stood in for.",),
    ),
    Peer(
        name="declearn",
        project="declearn",
        version="2.9.1",
        target=_adapter("declearn:adapter"),
        environment="declearn",
        requirements=(*TORCH, "declearn==2.9.1"),
        caveats=(
            "Its c is the mean over the clients met so far, which is as right as the mean over "
            "all.",
            "Judged with `steps_weighted=False`, which is not the default: by default the model is "
            "weighted by local steps and c uniformly, and with unequal steps x then moves "
            "otherwise than the suite asks.",
            "Sockets are replaced.",
            "The momentum buffer outlives a round there; it is emptied, as the suite's cases ask.",
        ),
    ),
    Peer(
        name="pfl",
        project="pfl-research",
        version="0.6.0",
        target=_adapter("pfl:adapter"),
        environment="pfl",
        requirements=(*TORCH, "pfl==0.6.0"),
        caveats=("pfl casts model differences to float32; they are kept in float64 here.",),
        findings=(
            Finding(
                "pfl/algorithm/scaffold.py:133, 157-158; pfl/model/pytorch.py:252-253",
                "`get_model_difference` returns y - x, and both options add it to c_i where x - y "
                "belongs, so that c_i has the sign of minus the gradient and the correction "
                "enlarges the drift.",
                "negate the difference in both places of scaffold.py",
            ),
            Finding(
                "pfl/algorithm/scaffold.py:133",
                "With option I the difference is a cached tensor of the model, and "
                "`InMemoryUserStateStorage`, which is judged, keeps a reference to it, so that all "
                "clients share one c_i; the storage on disk writes a copy.",
                "take the difference with `clone=True`",
            ),
        ),
    ),
    Peer(
        name="fluke",
        project="fluke",
        version="0.8.1",
        target=_adapter("fluke:adapter"),
        environment="fluke",
        requirements=(
            *TORCH, "rich", "typer", "omegaconf", "pandas", "scikit-learn", "torchmetrics",
            "psutil", "diskcache", "cerberus",
        ),
        alone=("fluke-fl==0.8.1",),
        caveats=(
            "Installed without trackers, data sets and torchvision, which are stood in for.",
            "With momentum it is judged with `persistency=False`, which is not the default, so "
            "that the buffer is empty in every round, as the suite's cases ask.",
        ),
        findings=(
            Finding(
                "fluke/algorithms/scaffold.py:160-165",
                "A server step other than 1 multiplies the weights of the models' average, so "
                "that the model itself is scaled in every round, not its change.",
                "add `global_step` times the difference of the average and the old model",
            ),
            Finding(
                "fluke/algorithms/scaffold.py:177-179",
                "With `weighted=True`, the default, x is averaged by the numbers of records and c "
                "uniformly; with False both are uniform.",
                "weight the changes of c_i as the models are weighted",
            ),
            Finding(
                "fluke/algorithms/scaffold.py:103, 117",
                "c_i is computed with the step size that the scheduler has set for the next "
                "epoch, and with momentum as if the step were plain SGD.",
                "store the mean of the raw gradients as c_i",
            ),
            Finding(
                "fluke/client.py and fluke/server.py, `save` and `load`",
                "Neither c nor the c_i are saved, and a client that is loaded fails in its next "
                "round (`fluke/algorithms/scaffold.py:97`).",
                "save and load `control` with the model",
            ),
        ),
    ),
    Peer(
        name="nvflare",
        project="NVIDIA FLARE (PyTorch)",
        version="2.9.0",
        target=_adapter("nvflare:adapter"),
        environment="nvflare",
        requirements=(*TORCH, "nvflare==2.9.0"),
        caveats=(
            "Network, persistor and event bus are replaced; the round loop is FLARE's.",
            "Its examples weight replies by local steps; a site sends its weight here.",
            "The site's loop is ours, after FLARE's example with CIFAR-10, but for one thing: the "
            "example keeps one optimiser for all rounds, and here the momentum buffer is empty in "
            "every round, as the suite's cases ask.",
            "Lost replies ask more than it promises.",
            "The Lightning client is judged apart; the TensorFlow client was not judged.",
        ),
        findings=(
            Finding(
                "nvflare/app_common/workflows/scaffold.py:133-139",
                "c moves by the mean change of the cohort's c_i, without S/N. With cohorts of one "
                "size and equal weights it is N/S times the mean. In the suite, where N/S is 2, "
                "that is slower and ends at the same point; with a larger N/S it can diverge, and "
                "with changing cohorts, weights or lost replies it ends elsewhere.",
                "multiply the mean change by the number of results over the number of clients; "
                "with weights, by the share of all weight that the results have",
                "the rows with sampling, changing cohorts and weights hold",
            ),
            Finding(
                "nvflare/app_opt/pt/scaffold.py, `model_update` and `terms_update`",
                "The correction is applied after the optimiser's step and c_i is computed from "
                "the whole move with one step size. With momentum that corrects the mean step of a "
                "round, but not each of its steps, and x comes to rest off the optimum (by 0.066 "
                "in the suite, and less with smaller steps). A schedule within "
                "the round makes it wrong where the caller passes the last step size, as the "
                "example does that is followed here; the mean one would be right.",
                "add the correction to the gradient, and store the mean of the raw gradients; for "
                "a schedule alone, pass the mean step size",
            ),
            Finding(
                "nvflare/app_opt/pt/scaffold.py, `terms_update`",
                "A site keeps its new c_i whether or not its result arrives.",
                "keep the old c_i until the controller has acknowledged the result",
            ),
        ),
    ),
    Peer(
        name="nvflare-lightning",
        project="NVIDIA FLARE (Lightning)",
        version="2.9.0",
        target=_adapter("nvflare_lightning:adapter"),
        environment="nvflare-lightning",
        requirements=(*TORCH, "lightning", "nvflare==2.9.0"),
        caveats=(
            "The server is that of FLARE (PyTorch): its first finding, the missing S/N, is the "
            "server's.",
            "`receive` and `send` of the client API are replaced; the trainer, the patch and the "
            "callbacks are FLARE's and Lightning's.",
            "FLARE asks for single or mixed precision; the trainer is told so, and the module's "
            "parameters are of double precision.",
            "Patched with `restore_state=False`: the momentum buffer is emptied in every round, "
            "as the suite's cases ask.",
            "Lost replies ask more than it promises.",
        ),
        findings=(
            Finding(
                "nvflare/app_common/workflows/scaffold.py:133-139",
                "c moves by the mean change of the cohort's c_i, without S/N: the server is the "
                "same.",
                "as for FLARE (PyTorch)",
            ),
            Finding(
                "nvflare/app_opt/lightning/scaffold.py, `after_train_batch`",
                "The correction is applied after the optimiser's step, so that momentum does not "
                "act on it, and c_i is computed from the whole move, with the effect that is "
                "described for FLARE (PyTorch). A schedule within the round "
                "is right here: the step sizes are averaged.",
                "add the correction to the gradients in `before_optimizer_step`, and store the "
                "mean of the raw gradients",
            ),
            Finding(
                "nvflare/app_opt/lightning/scaffold.py, `finish_round`",
                "A site keeps its new c_i whether or not its result arrives.",
                "keep the old c_i until the controller has acknowledged the result",
            ),
        ),
    ),
    Peer(
        name="p2pfl",
        project="p2pfl",
        version="0.4.4",
        target=_adapter("p2pfl:adapter"),
        environment="p2pfl",
        requirements=(*TORCH, "lightning", "requests", "pandas"),
        alone=("p2pfl==0.4.4",),
        caveats=(
            "Installed without Ray, gRPC and its data sets, which are stood in for.",
            "The aggregator is given the initial model; it would take a trained one.",
            "One aggregator serves all clients here; in p2pfl every node has its own, with its own "
            "c and model.",
            "Weights are not driven: its aggregator weights x and not c.",
        ),
        findings=(
            Finding(
                "p2pfl/learning/frameworks/pytorch/callbacks/scaffold_callback.py:107-109, 142-143",
                "The correction is written to `.grad` of the tensors of `state_dict()`, which are "
                "detached and have none, so that it never reaches the model; the hook also runs "
                "before the backward pass, when `.grad` is that of the step before and is set to "
                "zero next.",
                "in `on_before_optimizer_step`, add c - c_i to `.grad` of "
                "`pl_module.parameters()`",
            ),
            Finding(
                "p2pfl/learning/frameworks/pytorch/callbacks/scaffold_callback.py:129-130",
                "The new c_i lacks the term -c, so that c_i adds up over rounds.",
                "subtract c: `c_i - c + adjustment`",
            ),
            Finding(
                "p2pfl/learning/aggregators/scaffold.py:102-111",
                "c moves by the mean change of the cohort's c_i, without S/N.",
                "divide the sum by the number of all clients, which the aggregator has to be given",
            ),
        ),
    ),
    Peer(
        name="flgo",
        project="FLGo",
        version="0.4.4",
        target=_adapter("flgo:adapter"),
        environment="flgo",
        requirements=(*TORCH, "tqdm", "scipy", "pyyaml", "networkx", "toolz"),
        alone=("flgo==0.4.4",),
        caveats=(
            "Installed without plotting and data packages, which are stood in for.",
            "The constructors, which read a task from disk, are replaced.",
            "Restarts are not driven, though it saves c and the c_i.",
        ),
        findings=(
            Finding(
                "flgo/algorithm/scaffold.py:100-102",
                "With momentum, which is off by default, c_i is computed from the move as if the "
                "steps were plain SGD. Its error is then multiplied by 1 - gain in every round, "
                "where the gain is what momentum makes of a step: c_i settles at the right value "
                "while the gain is below about 2, and diverges above; in the suite it is 2.3. "
                "Without momentum all rows hold.",
                "store the mean of the raw gradients as c_i",
            ),
        ),
    ),
    Peer(
        name="substrafl",
        project="SubstraFL",
        version="1.0.0",
        target=_adapter("substrafl:adapter"),
        environment="substrafl",
        requirements=(*TORCH, "substrafl==1.0.0"),
        caveats=(
            "Called without the platform, which moves the same objects between processes.",
            "The model stays with the clients there; x is the sum of the averaged moves.",
            "Restarts are not driven, though its clients save c_i.",
            "The momentum buffer outlives a round there; it is emptied, as the suite's cases ask.",
        ),
        findings=(
            Finding(
                "substrafl/algorithms/pytorch/torch_scaffold_algo.py:256-268, 451-458",
                "With momentum, the correction is applied outside the optimiser, and c_i is "
                "computed from the whole move, which corrects the mean step of a round, but not "
                "each of its steps: x comes to rest off the optimum (by 0.066 in the suite, and "
                "less with smaller steps). With a schedule, c_i is computed by its last step size. "
                "It warns "
                "of schedules and of optimisers other than SGD, not of momentum. With plain SGD "
                "all rows hold.",
                "add the correction to the gradient, and store the mean of the raw gradients",
            ),
        ),
    ),
    Peer(
        name="fedlab-main",
        project="FedLab (main)",
        version="92552a742debc9d7bcf06378720c92fe90e15aa3",
        target=_adapter("fedlab:adapter"),
        environment="fedlab",
        requirements=(*TORCH, "tqdm"),
        alone=("fedlab==1.3.0",),
        repository="SMILELab-FL/FedLab",
        findings=(
            Finding(
                "fedlab/contrib/algorithm/scaffold.py:83-91",
                "The loop looks for `.grad` on the tensors of `state_dict()`, which are detached "
                "and have none, so that the corrected gradient is never written.",
                "write to the `.grad` of the parameter of that name, where there is one, and "
                "advance the index by every entry of `state_dict()`, as `model_grads` has them all",
                "in the simpler form of the lines that are commented out below it, which goes "
                "through the parameters and so is right for models without buffers, 41 rows hold "
                "and none fails",
            ),
        ),
        caveats=("The checkout is put before the release on the path.",),
    ),
    Peer(
        name="fl4health",
        project="FL4Health",
        version="ce141b95d251133e73b1d4faadc9c8bf44b14bb5",
        target=_adapter("fl4health:adapter"),
        environment="fl4health",
        requirements=FL4HEALTH,
        repository="VectorInstitute/FL4Health",
        caveats=(
            "Trackers and data packages are stood in for.",
            "Judged without `warm_start`, as is the default. With it, as in both of its examples, "
            "the server asks all clients before the first round, so that none joins late; that "
            "server was not judged.",
            "`fraction_fit` is the mean size of the case's cohorts over the number of clients.",
            "Lost replies ask more than it promises.",
        ),
        findings=(
            Finding(
                "fl4health/clients/scaffold_client.py:134-135",
                "A client that is sampled for the first time after round 1 starts with c_i = c, "
                "while the server has counted zero for it, so that c is no longer the mean.",
                "start with zeros",
            ),
            Finding(
                "fl4health/strategies/scaffold.py:343-346",
                "c moves by the nominal `fraction_fit`, not by the share of clients that replied.",
                "multiply by the number of results over the number of clients",
            ),
            Finding(
                "fl4health/clients/scaffold_client.py:172-173",
                "The client keeps its new c_i whether or not its reply arrives.",
                "keep the old c_i until the server has acknowledged the reply",
            ),
        ),
    ),
    Peer(
        name="fl4health-dp",
        project="FL4Health, DP-SCAFFOLD",
        version="ce141b95d251133e73b1d4faadc9c8bf44b14bb5",
        target=_adapter("fl4health:private"),
        environment="fl4health",
        requirements=FL4HEALTH,
        repository="VectorInstitute/FL4Health",
        caveats=(
            "No noise, and a clipping bound that is never reached.",
            "The server's strategy is `Scaffold`; its DP server asks for `OpacusScaffold`, which "
            "was not judged.",
            "The rows with sampling, changing cohorts and lost replies fail for the three reasons "
            "given for FL4Health, too: the classes are the same.",
        ),
        findings=(
            Finding(
                "fl4health/clients/scaffold_client.py:175-197, 219-227",
                "The correction is added to `.grad` before the step, and Opacus' optimiser "
                "replaces `.grad` by the clipped sum of the records' gradients in its step, so "
                "that the correction is lost.",
                "override the optimiser's `step`: `pre_step()`, add the correction, then "
                "`original_optimizer.step()`. Opacus' own hook between the two is taken by its "
                "accountant",
            ),
        ),
    ),
    Peer(
        name="pfllib",
        project="PFLlib",
        version="d832e76f6a23b833038949ec1e4fdefe63a4d350",
        target=_adapter("pfllib:adapter"),
        environment="torch",
        requirements=TORCH,
        repository="TsingZ0/PFLlib",
        root="system",
        caveats=(
            "Unequal steps by unequal data; its slow clients are judged apart.",
            "The random choices of clients and of lost replies are replaced by the case's, and the "
            "files of data sets by the case's batches.",
            "With a random join ratio `num_join_clients` is the smallest cohort, which has one "
            "client in the case with changing cohorts: hence the 1 in the suite's sentence.",
        ),
        findings=(
            Finding(
                "system/flcore/clients/clientscaffold.py:52, 69-73; "
                "system/flcore/servers/serverscaffold.py:92-93",
                "Clients renew c_i before some of their replies are dropped, so that c leaves the "
                "mean of the c_i.",
                "renew c_i for the clients in `uploaded_ids` only",
                "with the next, 47 rows hold and none fails",
            ),
            Finding(
                "system/flcore/servers/serverscaffold.py:129",
                "x is divided by `num_join_clients`, not by the number of replies; with a random "
                "join ratio, or lost replies, the step is too long or too short.",
                "divide by `len(self.uploaded_ids)`",
            ),
        ),
    ),
    Peer(
        name="pfllib-slow",
        project="PFLlib, slow clients",
        version="d832e76f6a23b833038949ec1e4fdefe63a4d350",
        target=_adapter("pfllib:slow_clients"),
        environment="torch",
        requirements=TORCH,
        repository="TsingZ0/PFLlib",
        root="system",
        findings=(
            Finding(
                "system/flcore/servers/serverscaffold.py:127",
                "A slow client runs fewer epochs, and the server recomputes its change of c_i "
                "with the full number.",
                "keep the number of epochs with the client and use it in `delta_yc`",
            ),
        ),
        caveats=(
            "Slow clients run a random number of epochs, fewer than half, there; here it is the "
            "case's.",
            "Rows other than those with unequal steps are those of `pfllib`, but for `tensors`, "
            "which is not driven here.",
        ),
    ),
    Peer(
        name="fl-bench",
        project="FL-bench",
        version="06e658bca5af6ce732e25bb7c0f8be321e14a85e",
        target=_adapter("flbench:adapter"),
        environment="torch",
        requirements=TORCH,
        repository="KarhouTam/FL-bench",
        caveats=(
            "A local epoch of its SCAFFOLD is one batch, while other methods there run whole "
            "epochs.",
            "The server's constructor, Ray, Hydra and data packages are replaced; a client has two "
            "records, as batches of one are skipped there.",
            "A schedule within a round is not driven, though it has one.",
        ),
        findings=(
            Finding(
                "src/server/scaffold.py:34; src/client/scaffold.py:45",
                "The client's new c_i stays with an object that all clients share; the server's "
                "`c_local`, from which the next package is made, is never written.",
                "send `c_plus` in the client's package and store it in `self.c_local[client_id]`",
                "40 rows hold, and the two with momentum fail for the next reason",
            ),
            Finding(
                "src/client/scaffold.py:38-40",
                "With momentum, which is off by default, c_i is computed from the move as if the "
                "steps were plain SGD, which goes wrong as in FLGo; hidden as long as c_i is never "
                "kept.",
                "store the mean of the raw gradients as c_i",
            ),
        ),
    ),
    Peer(
        name="fedbiomed",
        project="Fed-BioMed (aggregator)",
        version="6.4.1",
        target=_adapter("fedbiomed:adapter"),
        environment="fedbiomed",
        requirements=(*TORCH, "fedbiomed[researcher]==6.4.1"),
        caveats=(
            "This is the aggregator `Scaffold`; its other SCAFFOLD, which a warning of its code "
            "advises with secure aggregation, is judged apart. With secure aggregation this one is "
            "not called (`_experiment.py:912-917`), so that no correction is made; that was read, "
            "not run.",
            "The network is replaced: messages are written and read by its own methods and "
            "delivered one by one. torchvision is stood in for.",
            "Its default strategy takes all nodes in every round. Fewer take part by "
            "`Experiment.set_nodes`, as here, or by a strategy of the user's own.",
            "Its user guide says that it should be used with SGD only, and does not mention "
            "momentum, whose buffer is new in every round there. Its tutorial takes AdamW.",
            "It weights neither x nor c, and all nodes take the same number of steps.",
            "Lost replies are not driven: its default strategy ends the experiment.",
        ),
        findings=(
            Finding(
                "fedbiomed/researcher/aggregators/scaffold.py:392-401",
                "The step sizes of all nodes are looked up after a round, those of nodes without "
                "a reply from the researcher's training plan, which has no optimizer "
                "(`_training_plan_workflow.py:159`), so that a round in which not all nodes take "
                "part ends with an AttributeError.",
                "look up the step sizes of the nodes that replied; no other is used",
                tried="all rows that end with the error hold",
            ),
            Finding(
                "fedbiomed/researcher/aggregators/scaffold.py:470",
                "When a breakpoint is loaded, `nodes_states` become copies of `nodes_deltas`, "
                "which are c_i - c, so that the c_i are off by c; c is right. `mean: restart` and "
                "`moves: restart` fail as they read the c_i. With all nodes in every round these "
                "are replaced in the next one, and x is not affected.",
                "add `global_state` to them",
                tried="the rows with a restart hold",
            ),
            Finding(
                "fedbiomed/researcher/aggregators/scaffold.py:252-261",
                "With momentum, c_i is computed from the move as if the steps were plain SGD, "
                "which goes wrong as in FLGo.",
                "have the node send the mean of its raw gradients, and store it as c_i",
                tried="with all three, no row fails",
            ),
        ),
    ),
    Peer(
        name="fedbiomed-optimizer",
        project="Fed-BioMed (optimizer)",
        version="6.4.1",
        target=_adapter("fedbiomed:auxiliary"),
        environment="fedbiomed",
        requirements=(*TORCH, "fedbiomed[researcher]==6.4.1"),
        caveats=(
            "These are the modules of declearn (2.8.0) in Fed-BioMed's optimizers; declearn by "
            "itself is judged apart.",
            "Its c is the mean over the clients met so far, which is as right as the mean over "
            "all.",
            "The network is replaced as for the aggregator, and torchvision is stood in for. "
            "`FedAverage` casts models to float32; they are kept in float64 here.",
            "A node's number of records is its weight, and all take the same number of steps "
            "(`num_updates`). Unequal steps are not driven: there they come of unequal records, "
            "and so with unequal weights.",
            "The momentum buffer outlives a round there; it is emptied, as the suite's cases ask.",
            "Lost replies are not driven: its default strategy ends the experiment.",
            "Secure aggregation is not driven. Read, and its own steps of encryption and "
            "aggregation run apart with two nodes: the server then gets the mean of the changes of "
            "c_i where it expects their sum (`node/round.py:662-666`, `_secagg_crypter.py:443`, "
            "`_experiment.py:1087-1094`), so that with S nodes of equal numbers of records c is "
            "1/S of what it should be.",
        ),
        findings=(
            Finding(
                "fedbiomed/researcher/federated_workflows/_experiment.py:1013-1018",
                "Where the nodes' numbers of records differ, `FedAverage` weights the model by "
                "them, and c is the plain mean of the c_i, so that x comes to rest at the optimum "
                "of the nodes' losses without weights. With equal numbers all rows hold.",
                "multiply a node's change of c_i by its number of records, and have the server's "
                "module (declearn's) divide by the records of the nodes met so far, not by their "
                "number",
                tried="the rows that fail hold, and three others; the whole suite was not run",
            ),
        ),
    ),
    Peer(
        name="plato",
        project="plato",
        version="60d6779a0be16bd529f5f9d9cd34fd4d47f4e95a",
        target=_adapter("plato:adapter"),
        environment="plato",
        requirements=(*TORCH, "pyyaml", "python-socketio", "aiohttp"),
        repository="TL-System/plato",
        caveats=(
            "An old version, the newest of which we have a checkout. Its pull request 386 (for "
            "issue 382) sends the change of c_i and divides by steps and step size. Two later "
            "files that we have read, one of them `scaffold_strategy.py` at 0c9014b4f3, also add "
            "lr (c - c_i) to the model where the paper subtracts it, and set c_i to c + (x - y) / "
            "(K lr) where the paper has c_i - c + (x - y) / (K lr). Not having all of a later "
            "version we have not judged one.",
            "Sockets are replaced by a queue of what is emitted, and packages of data sets and "
            "models are stood in for. It asks for Python 3.12.",
            "`max_concurrency` is not set, so that a client's process trains, too. The server "
            "takes the first processes that are free, as many as there are clients in a round, and "
            "they serve all clients in turn.",
            "A client's number of records is its weight. An epoch is one batch.",
            "Schedules are not driven, though it has them.",
        ),
        findings=(
            Finding(
                "examples/customized_client_training/scaffold/scaffold_callback.py:48-52; "
                "scaffold_server.py:44-46",
                "A client sends its new c_i, which the server adds to c as if it were the change "
                "of c_i.",
                "send the change (pull request 386 does)",
                tried="with the next, 25 rows hold and 13 fail",
            ),
            Finding(
                "examples/customized_client_training/scaffold/scaffold_trainer.py:101",
                "The move is divided by the number of epochs, not by the number of steps and the "
                "step size. That is right only where batches in an epoch times the step size are "
                "1, as in its example (100 batches, 0.01). The 0.15 of the suite's sentence is the "
                "suite's step size.",
                "divide by both (pull request 386 does)",
                tried="see the first",
            ),
            Finding(
                "examples/customized_client_training/scaffold/scaffold_client.py:53-61",
                "A process that has served another client before keeps that client's c_i where the "
                "next one has none of its own yet.",
                "set `self.trainer.client_control_variate` to None where there is no file",
                tried="with the first two, 31 rows hold and 7 fail, with weights or momentum",
            ),
            Finding(
                "plato/servers/fedavg.py:154; "
                "examples/customized_client_training/scaffold/scaffold_server.py:46",
                "x is averaged by the numbers of records, and the changes of c_i all count 1/N.",
                "weight the changes of c_i by the clients' shares of all records",
                tried="with the suite's total of records and all others, no row fails",
            ),
            Finding(
                "examples/customized_client_training/scaffold/scaffold_trainer.py:60-81, 92-102",
                "Momentum acts on the gradient alone, the correction is added after the "
                "optimiser's step, and c_i is computed from the whole move, as in NIID-Bench. Its "
                "example has momentum 0.9.",
                "add c - c_i to the gradient before the step, and store the mean of the raw "
                "gradients as c_i",
                tried="with all others, no row fails",
            ),
        ),
    ),
    Peer(
        name="fedml",
        project="FedML",
        version="0.9.6",
        target=_adapter("fedml:adapter"),
        environment="fedml",
        requirements=TORCH,
        alone=("fedml==0.9.6",),
        caveats=(
            "This is its simulator in a single process, the only place that has SCAFFOLD there, "
            "on a CPU.",
            "Installed without the packages of its platform, which are stood in for. The random "
            "choice of clients, the evaluation and the loss are replaced.",
            "A client's number of records is its weight, which has no effect before the first "
            "patch; an epoch has as many batches as it has local steps.",
            "`initialize_all_clients`, which has no default, is true, so that each client has a "
            "c_i of its own.",
            "It has no momentum; Adam, which it has, was not driven.",
        ),
        findings=(
            Finding(
                "fedml/ml/aggregator/agg_operator.py:116-117",
                "The sums over the clients are replaced by what the last client of the round has "
                "sent: x moves by its move alone (in round 1, see the third), and c by a share 1/N "
                "of its change.",
                "remove line 116, and multiply `total_c_delta_para[k]` by `w_c` in line 117",
                tried="with the next, 20 rows hold and 27 fail",
            ),
            Finding(
                "fedml/simulation/sp/scaffold/client.py:44-53",
                "The new c_i is written into a dictionary and not into `c_model_local`, so that "
                "c_i stays zero.",
                "end `train` with `self.c_model_local.load_state_dict(c_new_para)`",
                tried="see the first",
            ),
            Finding(
                "fedml/simulation/sp/scaffold/scaffold_trainer.py:81",
                "On a CPU, x shares its memory with the model that the clients train, until the "
                "first correction. So in round 1 the first client's first step changes x before "
                "the others begin.",
                "copy what `get_model_params` returns (`copy.deepcopy`)",
                tried="with the first two, 42 rows hold and 5 fail, all with weights",
            ),
            Finding(
                "fedml/ml/aggregator/agg_operator.py:106, 115",
                "x is weighted by the numbers of records, and c is not. Line 116 hides that.",
                "weight the changes of c_i by the clients' shares of all records",
                tried="with all others, no row fails",
            ),
        ),
    ),
    Peer(
        name="flamby",
        project="FLamby",
        version="edacf54d5211520583b0133d55ac39b6fda8324b",
        target=_adapter("flamby:adapter"),
        environment="flamby",
        requirements=(*TORCH, "tqdm", "opacus", "tensorboard"),
        repository="owkin/FLamby",
        caveats=(
            "It has all clients in every round, and asks for plain SGD. Rows that need anything "
            "else are not offered.",
            "Its clients keep c_i - c only. c is read from the move of the model, and c_i from the "
            "correction of the next round, for which a round is added.",
            "A client's number of records is its weight; all take the same number of steps, as "
            "there.",
            "Differential privacy, which it has, is judged apart. Running statistics were not "
            "driven.",
            "torch and Opacus are newer than those of its time (it asks for torch 1.13.1 or "
            "later).",
        ),
    ),
    Peer(
        name="flamby-dp",
        project="FLamby, differential privacy",
        version="edacf54d5211520583b0133d55ac39b6fda8324b",
        target=_adapter("flamby:private"),
        environment="flamby",
        requirements=(*TORCH, "tqdm", "opacus", "tensorboard"),
        repository="owkin/FLamby",
        caveats=(
            "No noise, and a clipping bound that is never reached; Opacus' search for the size of "
            "the noise is replaced.",
            "It warns that the privacy bounds are not valid for SCAFFOLD, which we have not "
            "judged.",
        ),
        findings=(
            Finding(
                "flamby/strategies/utils.py:349-353",
                "The correction is a term of the loss that no record has a part in. Opacus' "
                "optimiser replaces `.grad` by the clipped sum of the records' gradients in its "
                "step, so that the correction is lost.",
                "override the optimiser's `step`: `pre_step()`, subtract the correction from "
                "`.grad`, then `original_optimizer.step()`",
                tried="no row fails",
            ),
        ),
    ),
    Peer(
        name="niid-bench-original",
        project="NIID-Bench",
        version="61b901ab645e62391772e9898384c2c3485b7a6c",
        target=_adapter("niid_bench_original:adapter"),
        environment="torch",
        requirements=TORCH,
        repository="Xtra-Computing/NIID-Bench",
        caveats=(
            "Its script is run as it is. Data, networks, the loss, the random choice of clients "
            "and the evaluation are replaced, and packages of data sets are stood in for.",
            "A client's number of records is its weight, and an epoch has as many batches as it "
            "has local steps. Unequal steps are driven with equal weights; in its script they come "
            "of unequal numbers of records, and so with the first finding.",
            "Momentum is off by default; all of its scripts that run SCAFFOLD have 0.9. `--reg`, "
            "by default 1e-5, is 0 here. Adam and AMSGrad, which it offers, were not driven.",
            "The network that c and the c_i begin as is drawn as torch's layers are.",
            "torch is newer than the version that it names.",
        ),
        findings=(
            Finding(
                "experiments.py:1026; experiments.py:680",
                "x is averaged by the numbers of records, and c is the plain mean of the c_i. With "
                "unequal numbers x comes to rest at the optimum of the clients' losses without "
                "weights. Its default partition has equal ones.",
                "weight the changes of c_i by the clients' shares of all records",
                tried="the rows with weights hold",
            ),
            Finding(
                "experiments.py:312, 345-349, 364",
                "Momentum acts on the gradient alone, the correction is subtracted after the "
                "optimiser's step, and c_i is computed from the whole move, with the effect that "
                "is described for Flower's baseline, which replicates this benchmark.",
                "add c - c_i to the gradient before the step, and store the mean of the raw "
                "gradients as c_i",
                tried="the rows with momentum hold; with all three, no row fails",
            ),
            Finding(
                "experiments.py:992-997",
                "c and all c_i begin as one network with random weights. With all clients in every "
                "round that cancels; with sampling, clients are corrected by these weights until "
                "all have taken part once, and the end is the same. `start`, `replication` and "
                "`units` fail for this alone.",
                "begin with zeros",
                tried="the rows without weights and momentum hold",
            ),
            Finding(
                "experiments.py:348-350, 363-366",
                "Both loops run over the whole `state_dict`, so that running statistics are "
                "corrected as if they were parameters. With all clients in every round that "
                "cancels in the average; with sampling, in a run apart, it does not. No row has "
                "running statistics.",
                "loop over `named_parameters()`",
            ),
        ),
    ),
    Peer(
        name="niid-bench",
        project="Flower, baseline niid_bench",
        version="fdef7afb1dca3030553be302366cfd285ed6632c",
        target=_adapter("niid_bench:adapter"),
        environment="niid-bench",
        requirements=("torch==2.13.0", "numpy<2", "flwr==1.5.0"),
        repository="adap/flower",
        root="baselines/niid_bench",
        caveats=(
            "torch is newer than the version that the baseline pins.",
            "Hydra's configuration, the network, the client manager and the loss are replaced.",
            "Its own experiments have all clients in every round, so that the first finding and "
            "the last do not touch them; the second does, as momentum 0.9 is its default.",
            "A client that has not been asked yet is taken to hold what it would begin with, the "
            "present model. For that reason alone `kept: sampling` fails, and c leaves the mean in "
            "round 1; with the initial model, it would in round 2.",
        ),
        findings=(
            Finding(
                "niid_bench/client_scaffold.py:70-72; niid_bench/server_scaffold.py:75-78",
                "A client's first c_i is the model that it is sent, and c begins as the initial "
                "model. With all clients in every round both cancel; with sampling c is not the "
                "mean of the c_i.",
                "begin both with zeros, as the constructor of the client does",
            ),
            Finding(
                "niid_bench/models.py:92-99; niid_bench/client_scaffold.py:93-100",
                "Momentum acts on the gradient alone, beside the correction, and c_i is computed "
                "from the whole move, so that it is the gradient times the gain of the momentum. "
                "This corrects the mean step of a round, but not each of its steps: x comes to "
                "rest off the optimum, by a distance that is proportional to the step size (0.066 "
                "in the suite).",
                "add c - c_i to the gradient before the step, and store the mean of the raw "
                "gradients as c_i",
            ),
            Finding(
                "niid_bench/strategy.py:118-128; niid_bench/server_scaffold.py:142-147",
                "The changes of c_i are averaged by the numbers of records of the cohort and "
                "multiplied by S/N. With weights and sampling, c leaves the mean of the c_i also "
                "where both begin with zeros.",
                "multiply by the cohort's share of all records",
            ),
        ),
    ),
)  # fmt: skip

PEERS = {peer.name: peer for peer in _ALL}


def find(name: str) -> Peer:
    """Return a peer by name.

    >>> find("fedlab").version
    '1.3.0'

    Raises:
        InputError: If there is none of that name.
    """
    if name not in PEERS:
        raise InputError(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
    return PEERS[name]
