"""What the forkserver imports once, so that a rank costs a fork (about 0.1 s) and not ten seconds of imports.

Imports only: no tensor is made and no thread pool started here, since both would be inherited by every rank.
"""

import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401
import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # noqa: F401

import shardwise.prepare
import shardwise.train  # noqa: F401
