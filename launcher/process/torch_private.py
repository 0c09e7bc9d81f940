"""The private names of torch that the launcher uses, and the versions of torch in which they were checked.

torch promises nothing about them. A test finds every use in the launcher and compares its calls with the
signatures of each version, which scripts/torch_private_names.py reads from wheels. Imports no torch.
"""

from __future__ import annotations

import warnings
from functools import cache

CHECKED = ("2.11", "2.12", "2.13", "2.14")

NAMES = (
    "torch._C.DisableTorchFunction",
    "torch._C._are_functorch_transforms_active",
    "torch._C._dispatch_has_kernel",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._dispatch_keyset_full_after",
    "torch._dynamo.config.disable",
    "torch._dynamo.config.recompile_limit",
    "torch._dynamo.eval_frame.OptimizedModule",
    "torch._dynamo.graph_break",
    "torch._dynamo.mark_static",
    "torch._dynamo.maybe_mark_dynamic",
    "torch._foreach_add_",
    "torch._foreach_copy_",
    "torch._foreach_mul",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._foreach_zero_",
    "torch._fused_adamw_",
    "torch._fused_sgd_",
    "torch._functorch.config.backward_pass_autocast",
    "torch._ops.OpOverload.__call__",
    "torch._ops.OpOverload._name",
    "torch._ops.OpOverload._schema",
    "torch._ops.OpOverload.redispatch",
    "torch.cpu._is_amx_fp16_supported",
    "torch.cpu._is_avx512_bf16_supported",
    "torch.distributed.distributed_c10d._abort_process_group",
    "torch.distributed.distributed_c10d._set_pg_timeout",
    "torch.distributed.distributed_c10d.ProcessGroup._get_backend",
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._construct_event",
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._monitor_workers",
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._pcontext",
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._shutdown",
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._start_workers",
    "torch.distributed.elastic.multiprocessing.api.MultiprocessContext._pc",
    "torch.nn.modules.module.Module._forward_pre_hooks",
    "torch.nn.modules.module.Module._modules",
    "torch.nn.modules.module.Module._parameters",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.utils.data._utils.worker.WorkerInfo",
    "torch.utils.data._utils.worker._worker_info",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers",
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._workers",
)

# Attributes and functions of C++ without a line of Python or a stub: they are tested with the installed torch
# only. `_timeout` is one of a ProcessGroup's options, `_saved_...` belong to a node of the backward pass.
COMPILED = (
    "_cdata",
    "_distributed_c10d",
    "_dump_fr_trace_json",
    "_is_mkldnn_bf16_supported",
    "_is_mkldnn_fp16_supported",
    "_saved_other",
    "_saved_reduction",
    "_timeout",
)


@cache  # workers that are forked after the first call do not repeat the warning
def warn_if_unchecked(torch_version: str) -> None:
    """Warn, once per process and its forks, of a torch in which these names were not checked."""
    if ".".join(torch_version.split(".")[:2]) not in CHECKED:
        warnings.warn(
            f"torch {torch_version} is not among the versions that this launcher was checked with "
            f"({', '.join(CHECKED)}): private functions of torch that it uses may have changed. If a run "
            "ends with a TypeError or AttributeError, install one of these versions.",
            stacklevel=2,
        )
