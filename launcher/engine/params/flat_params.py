"""One flat layout shared by weights, gradients, masters and optimizer states.

Owns where each trainable parameter lies in the flat buffers and makes the model's parameters views of
them. Matrices (two or more dimensions) and vectors form two flat buffers, because half policies keep vectors
in fp32. Offsets follow the reverse order of registration, roughly that in which autograd produces gradients.
Parameters are also grouped here into buckets, which are sent together and divide evenly among the ranks.
Within a bucket the parameters of one group are adjacent: groups change neither the buckets nor their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from launcher.engine.errors import UnusableError
from launcher.engine.names import named_parameters
from launcher.engine.params.flat_buffers import BucketRange, FlatBuffer, ParamRange
from launcher.engine.params.param_groups import Grouping
from launcher.engine.precision.op_lists import FLOATS
from launcher.engine.precision.policy import Policy

# The flat buffers: parameters that are half where a policy has half weights, and those that are always fp32.
POLICY_DTYPE_PARAMS, FP32_PARAMS = "policy_dtype_params", "fp32_params"
# Elements: 64 bytes in half precision, one cache line. Kernels are slower on what is not aligned to 16 bytes.
ALIGNMENT = 32
FIRST_BUCKET_BYTES = 1 << 20
# 1 MB takes 0.3 ms at 25 Gbit/s, more than the latency of a message; 25 MB is the default of DDP's
# bucket_cap_mb.
MIN_BUCKET_BYTES, MAX_BUCKET_BYTES = 1 << 20, 25 << 20
# The slices of a flat tensor that are updated alike, in order, by index into a grouping's options.
GroupSlices = dict[int, list[slice]]


class Layout:
    """The flat form of a model's trainable parameters. Building it moves the parameters there.

    Freezes the parameters that `grouping` freezes. Raises UnusableError if no parameter is trainable, if
    parameters are on two devices, or for a dtype other than fp32, fp16, bf16.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        gradient_dtype: torch.dtype | None = None,
        world_size: int = 1,
        bucket_bytes: int | None = None,
        grouping: Grouping | None = None,
    ) -> None:
        self.grouping = grouping or Grouping()
        frozen = self.grouping.frozen
        named = named_parameters(model)
        trainable = [(n, p) for n, p in named.items() if p.requires_grad and n not in frozen]
        _check_trainable(model, trainable, len(frozen))
        for name in frozen:
            named[name].requires_grad_(False)
        self.parameters: dict[str, nn.Parameter] = dict(reversed(trainable))
        self.device = trainable[0][1].device
        self.world_size = world_size
        halves = half_in(model, policy)
        in_policy_dtype = [n for n, p in self.parameters.items() if p in halves]
        in_fp32 = [n for n, p in self.parameters.items() if p not in halves]
        gradient_dtype = gradient_dtype or policy.gradient_dtype
        # Nothing is sent: buckets only bound how many gradients are kept twice, and each costs a kernel.
        self._alone = world_size == 1 and self.device.type != "cpu"
        # An eighth of the model, within limits, so that most of it is sent while the backward pass continues:
        # one bucket of 25 MB would leave a model of 16 MB no overlap.
        total = sum(self.parameters[n].numel() * gradient_dtype.itemsize for n in in_policy_dtype)
        total += sum(self.parameters[n].numel() * 4 for n in in_fp32)
        smallest = MAX_BUCKET_BYTES if self._alone else MIN_BUCKET_BYTES
        bucket_bytes = bucket_bytes or min(max(total // 8, smallest), MAX_BUCKET_BYTES)
        self.flat_buffers: list[FlatBuffer] = []
        for name, members, weight, grad in (
            (POLICY_DTYPE_PARAMS, in_policy_dtype, policy.weights, gradient_dtype),
            (FP32_PARAMS, in_fp32, torch.float32, torch.float32),
        ):
            if members:
                bucket_ranges = self._cut(members, bucket_bytes // grad.itemsize)
                masters = policy.masters or weight == torch.float32
                self.flat_buffers.append(self._move(name, bucket_ranges, weight, grad, masters))
        for p in model.parameters():  # frozen ones take part in half arithmetic like trainable ones
            if not p.requires_grad and p.dtype in FLOATS:
                p.data = p.data.to(policy.weights if p in halves else torch.float32)

    def _cut(self, members: Sequence[str], bucket_numel: int) -> list[BucketRange]:
        """Group the named parameters into buckets of about `bucket_numel` elements, and give them offsets.

        Within a bucket they are in the order of their groups, else as given.
        """
        # So that the shards of all ranks are aligned, too.
        multiple = ALIGNMENT * self.world_size
        bucket_ranges: list[BucketRange] = []
        index, start = len(list(self.params)), 0
        # The first bucket of a model is small, so that communication starts early in the backward pass.
        # Counted in halves of 2 bytes, as most models have them: in fp32 it is twice as large.
        whole = bool(self.flat_buffers) or self._alone
        first_numel = bucket_numel if whole else min(bucket_numel, FIRST_BUCKET_BYTES // 2)
        for names in self._joined(members, bucket_numel, first_numel):
            params, end = [], start
            for name in sorted(names, key=lambda name: self.grouping.index.get(name, 0)):
                p = self.parameters[name]
                # Strides without gaps that keep the order of dimensions, so that channels_last survives.
                stride = torch.empty_like(p, device="meta").stride()
                params.append(ParamRange(name, index, p.shape, stride, end, p.numel()))
                index, end = index + 1, end + _round_up(p.numel(), ALIGNMENT)
            end = start + _round_up(end - start, multiple)
            bucket_ranges.append(BucketRange(tuple(params), start, end))
            start = end
        return bucket_ranges

    def _joined(self, members: Sequence[str], limit: int, first_limit: int) -> list[list[str]]:
        """The names in order, joined up to `limit` elements, the first of them up to `first_limit`.

        A parameter that is larger is alone.
        """
        found: list[list[str]] = []
        held = 0  # elements of the last group
        for name in members:
            numel = self.parameters[name].numel()
            if not found or held + numel > (first_limit if len(found) == 1 else limit):
                found.append([])
                held = 0
            found[-1].append(name)
            held += _round_up(numel, ALIGNMENT)
        return found

    def _move(
        self,
        name: str,
        bucket_ranges: list[BucketRange],
        weight: torch.dtype,
        grad: torch.dtype,
        masters: bool,
    ) -> FlatBuffer:
        """Copy the parameters of these buckets into flat memory, and make them views of it."""
        exact = torch.zeros(bucket_ranges[-1].end, dtype=torch.float32, device=self.device)
        params = [param for bucket_range in bucket_ranges for param in bucket_range.params]
        for param in params:
            p, view = self.parameters[param.name], param.view(exact)
            view.copy_(p.detach())
            p.grad = None  # torch refuses a grad of another dtype than its parameter
            p.data = view  # frees the memory of the parameter, before more is taken
        weights = exact.to(weight)  # the same tensor for fp32
        for param in params:
            self.parameters[param.name].data = param.view(weights)
        grads = torch.zeros(len(exact), dtype=grad, device=self.device)
        return FlatBuffer(weights, exact if masters else None, grads, name, bucket_ranges)

    @property
    def params(self) -> Iterator[ParamRange]:
        """All parameters, by flat buffer, in the order of `ParamRange.index`."""
        return (param for flat_buffer in self.flat_buffers for param in flat_buffer.params)

    def group_slices(self, flat_buffer: FlatBuffer, part: slice) -> GroupSlices:
        """The elements of `part` of a flat buffer that are updated alike, padding included."""
        nexts = [*(param.offset for param in flat_buffer.params[1:]), flat_buffer.numel]
        found: GroupSlices = {}
        for param, following in zip(flat_buffer.params, nexts, strict=True):
            own = found.setdefault(self.grouping.index.get(param.name, 0), [])
            start = max(param.offset, part.start) - part.start
            end = min(following, part.stop) - part.start
            if start < end and own and own[-1].stop == start:
                own[-1] = slice(own[-1].start, end)
            elif start < end:
                own.append(slice(start, end))
        return found

    def named(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Views by parameter name of flat tensors, one per flat buffer and as long as that."""
        return {
            param.name: param.view(flat)
            for flat_buffer, flat in zip(self.flat_buffers, flats, strict=True)
            for param in flat_buffer.params
        }

    def gradients(self) -> dict[str, Tensor]:
        """Views of the gradients by parameter name; scaled, valid from step() to the next backward."""
        return self.named([flat_buffer.grad for flat_buffer in self.flat_buffers])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _check_trainable(model: nn.Module, trainable: list[tuple[str, nn.Parameter]], num_frozen: int) -> None:
    """`num_frozen`: how many parameters groups freeze."""
    if not trainable:
        raise UnusableError(
            f"{type(model).__name__} has no trainable parameter: parameter groups freeze {num_frozen}, and "
            "the others have requires_grad=False."
        )
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise UnusableError(f"parameters lie on {len(devices)} devices ({devices}). Move the model to one.")
    for name, p in trainable:
        if p.dtype not in FLOATS:
            raise UnusableError(
                f"parameter {name} is {p.dtype}. Trainable parameters are float32, float16 or bfloat16: "
                "convert it, or freeze it with requires_grad_(False)."
            )


def half_in(model: nn.Module, policy: Policy) -> set[nn.Parameter]:
    """The parameters that are half where a policy has half weights: matrices, and all of an RNN's.

    cuDNN requires the parameters of one RNN in one dtype, and autocast refuses to mix them.
    """
    halves = {p for p in model.parameters() if p.ndim >= 2}
    if policy.weights != torch.float32:
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                halves.update(module.parameters())
    return halves
