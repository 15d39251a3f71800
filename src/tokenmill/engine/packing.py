"""Whether a model's weights stay packed."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

from tokenmill.config import RunConfig
from tokenmill.errors import ConfigError
from tokenmill.models.packed import why_not_packed
from tokenmill.ops.cpu.kernels import compiled
from tokenmill.parallel.group import Group
from tokenmill.spec import HardwareInfo
from tokenmill.weights.checkpoint import Checkpoint

log = logging.getLogger(__name__)

BITS = {"int8": 8, "int4": 4}  # of weights that are plain numbers, by --quantization


def find_library(run: RunConfig, hardware: HardwareInfo, checkpoint: Checkpoint | None, group: Group) -> Path | None:
    """The C kernels, if they shall keep the model's weights packed.

    Raises ConfigError: that is asked for, and cannot be done.
    """
    wanted, bits = run.model.quantization, BITS.get(run.model.quantization)
    if wanted == "none" or (wanted == "auto" and run.model.dtype != "auto"):
        return None
    reason = why_not_kept_packed(run, hardware, group)
    if reason is None and checkpoint is not None:
        reason = why_not_packed(checkpoint, bits)
    if reason is None and checkpoint is not None:
        try:
            return compiled()
        except (OSError, subprocess.SubprocessError) as error:
            reason = str(error)
            log.warning("the kernels that keep weights packed are not there, so these are expanded: %s", reason)
    if bits is not None:
        raise ConfigError(f"--quantization {wanted} cannot be used: {reason or 'there are no weights to read'}")
    return None


def why_not_kept_packed(run: RunConfig, hardware: HardwareInfo, group: Group) -> str | None:
    """Why no model's weights can be kept packed with this configuration; None: they can."""
    if hardware.device != "cpu" or group.size > 1:
        return "weights are kept packed on one CPU rank alone"
    if run.engine.attention != "auto":
        return f"packed weights come with an attention of their own, not with --attention {run.engine.attention}"
    if run.engine.kv_dtype == "float16":
        return "its attention takes --kv-dtype float32 or bfloat16"
    return None
