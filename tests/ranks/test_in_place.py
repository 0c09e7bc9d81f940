"""In-place changes on several ranks: all hold the same bits, whoever's samples asked for which rows."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, AdamW, Policy, Scaling, Stepper, UnusableError, Wire
from launcher.training.replicas import check_replicas
from tests.engine.observe import state_digest, train
from tests.models import conv_net, features, loss_sum
from tests.ranks.harness import run_ranks

WIRES = {"native": Wire(), "sharded": Wire(shard=True)}


class Table(nn.Module):
    """Row `i` of a table is asked for by whoever has sample `i`; rows are kept shorter than 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 5, max_norm=1.0)
        self.head = nn.Linear(5, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.table(rows))


def batch(step: int, part: int) -> tuple[Tensor, Tensor]:
    """Rows 0 to 3 for the first half of the samples, 4 to 7 for the second; row 8 for none."""
    generator = torch.Generator().manual_seed(2 * step + part)
    return torch.randint(4, (4,), generator=generator) + 4 * part, torch.randint(3, (4,), generator=generator)


def train_a_table(env: WorkerEnv, wire: Wire, policy: Policy) -> dict[str, Tensor]:
    stepper = Stepper(
        Table(), SGD(0.5), policy, env.group, wire=wire, scaling=Scaling("static", 64), micro_batches=2
    )
    for step in range(4):
        parts = [env.rank] if env.world_size > 1 else [0, 1]
        for part in parts:
            if step == 2 and part == 1:
                continue  # nothing for the last rank
            rows, classes = batch(step, part)
            with stepper.forward():
                loss = loss_sum(stepper.model(rows), classes)
            stepper.backward(loss, 4)
        stepper.step()
        for part in parts:  # an evaluation renormalises rows as well
            with torch.no_grad(), stepper.forward():
                stepper.model(batch(step + 10, part)[0])
        check_replicas(stepper)
    return {name: value.clone() for name, value in stepper.state().weights.items()}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("policy", [Policy.fp16(), Policy.fp32()], ids=lambda policy: policy.name)
def test_rows_that_one_rank_renormalised_are_so_on_all(wire, policy) -> None:
    first, second = run_ranks(2, train_a_table, WIRES[wire], policy)
    alone = train_a_table(WorkerEnv(0, 1, 0, 1, torch.device("cpu"), None), Wire(), policy)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert torch.allclose(value, alone[name], atol=1e-5 if policy == Policy.fp32() else 5e-3), name
    assert first["table.weight"][:8].norm(dim=1).max() < 1.2
    assert torch.equal(first["table.weight"][8], Table().table.weight[8])


def clamp_between(env: WorkerEnv, wire: Wire) -> tuple[str, str]:
    """Digests after two steps with a clamp in between: written in place, and loaded as a state."""
    digests = []
    for loads in (False, True):
        stepper = Stepper(
            conv_net(), AdamW(0.01), Policy.fp16(), env.group, wire=wire, scaling=Scaling("static", 64)
        )
        train(stepper, *features(4, env.rank, (3, 8, 8)))
        before = {name: value.clone() for name, value in stepper.named_masters().items()}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for p in stepper.model.parameters():
                p.clamp_(-0.0625, 0.0625)
            state = stepper.state().clone()
        for name, p in stepper.model.named_parameters():
            kept = before[name].to(p.dtype) == p
            assert torch.equal(state.weights[name], torch.where(kept, before[name], p.float()))
        if loads:
            stepper = Stepper(
                conv_net(), AdamW(0.01), Policy.fp16(), env.group, wire=wire, scaling=Scaling("static", 64)
            )
            stepper.load(state)
        train(stepper, *features(4, 2 + env.rank, (3, 8, 8)))
        digests.append(state_digest(stepper))
        check_replicas(stepper)
    return digests[0], digests[1]


@pytest.mark.parametrize("wire", ["native", "sharded"])
def test_a_clamp_reaches_the_masters_wherever_they_are(wire) -> None:
    for written, loaded in run_ranks(2, clamp_between, WIRES[wire]):
        assert written == loaded


def change_through_data(env: WorkerEnv) -> str:
    """Only elements that rank 0 owns change, and both ranks must raise."""
    stepper = Stepper(nn.Linear(64, 64), SGD(0.1), Policy.fp16(), env.group, wire=Wire(shard=True))
    stepper.model.weight.data[0, 0] = 5.0
    with pytest.raises(UnusableError, match=r"changed through `\.data`") as raised:
        stepper.state()
    return str(raised.value)


def test_a_change_through_data_is_refused_by_all_ranks_at_once() -> None:
    first, second = run_ranks(2, change_through_data)
    assert first == second
