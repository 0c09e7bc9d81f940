"""The generators of a process in a checkpoint, of whatever kind NumPy's is."""

import numpy as np
import pytest
import torch
from numpy.random import MT19937, PCG64, SFC64, Philox, mtrand

from launcher.checkpoint.generators import restore_states, states
from launcher.checkpoint.snapshot import Origin, Progress
from launcher.distributed.env import WorkerEnv
from launcher.engine import SGD, Policy, Stepper
from tests.models import mlp
from tests.snapshots import IDENTITY, take

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def usual():
    generator = mtrand.get_bit_generator()
    yield
    mtrand.set_bit_generator(generator)


@pytest.mark.parametrize("kind", [MT19937, PCG64, Philox, SFC64], ids=lambda kind: kind.__name__)
def test_each_kind_of_numpys_generator_resumes(kind):
    mtrand.set_bit_generator(kind(1))
    np.random.standard_normal()  # leaves a spare one
    saved = states(CPU)
    expected = np.random.standard_normal(3).tolist(), np.random.bytes(9)
    assert len({tensor.numel() for name, tensor in saved.items() if name != "cpu"}) == 1
    mtrand.set_bit_generator(kind(2))  # as a process that starts again
    np.random.rand(5)
    restore_states(saved, CPU)
    assert (np.random.standard_normal(3).tolist(), np.random.bytes(9)) == expected


def test_the_state_of_another_kind_is_left_alone():
    saved = states(CPU)
    mtrand.set_bit_generator(PCG64(1))
    expected = np.random.get_state(legacy=False)
    restore_states(saved, CPU)
    assert np.random.get_state(legacy=False) == expected


def test_buffers_of_every_shape_are_saved_beside_another_kind_of_generator():
    mtrand.set_bit_generator(PCG64(1))
    model = mlp()
    buffers = {
        "empty": torch.empty(0),
        "flag": torch.tensor(True),
        "table": torch.arange(6, dtype=torch.int16).view(2, 3).T,
    }
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    stepper = Stepper(model, SGD(0.1), Policy.fp16(), reference_count=1)
    env = WorkerEnv(0, 1, 0, 1, CPU, None)
    saved = take(stepper, env, IDENTITY, Origin(1, "fp16"), Progress(0, 1, 1))
    assert "numpy.PCG64" in saved.random
    for name, buffer in buffers.items():
        assert saved.engine.buffers[name].dtype == buffer.dtype
        assert torch.equal(saved.engine.buffers[name], buffer)
