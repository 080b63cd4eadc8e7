"""The zoo: every task by its name, in the sizes of its paper and in small ones."""

from __future__ import annotations

from collections.abc import Mapping

from waterflow.models.bert import BERT_BASE, BERT_BASE_SMALL
from waterflow.models.deepfm import DEEPFM, DEEPFM_SMALL
from waterflow.models.espcn import ESPCN, ESPCN_SMALL
from waterflow.models.gcn import GCN, GCN_SMALL
from waterflow.models.gpt2 import GPT2, GPT2_SMALL
from waterflow.models.inception import INCEPTION_V3, INCEPTION_V3_SMALL
from waterflow.models.lstm import LSTM_LM, LSTM_LM_SMALL
from waterflow.models.nasnet import NASNET_MOBILE, NASNET_MOBILE_SMALL
from waterflow.models.resnet import RESNET50, RESNET50_SMALL, RESNET152, RESNET152_SMALL
from waterflow.models.tacotron2 import TACOTRON2, TACOTRON2_SMALL
from waterflow.models.task import Task
from waterflow.models.vae import VAE, VAE_SMALL
from waterflow.models.vgg import VGG16, VGG16_SMALL

FULL = (
    RESNET50,
    RESNET152,
    INCEPTION_V3,
    NASNET_MOBILE,
    VGG16,
    BERT_BASE,
    GPT2,
    TACOTRON2,
    LSTM_LM,
    VAE,
    ESPCN,
    GCN,
    DEEPFM,
)
SMALL = (
    RESNET50_SMALL,
    RESNET152_SMALL,
    INCEPTION_V3_SMALL,
    NASNET_MOBILE_SMALL,
    VGG16_SMALL,
    BERT_BASE_SMALL,
    GPT2_SMALL,
    TACOTRON2_SMALL,
    LSTM_LM_SMALL,
    VAE_SMALL,
    ESPCN_SMALL,
    GCN_SMALL,
    DEEPFM_SMALL,
)
TASKS: Mapping[str, Task] = {task.name: task for task in (*FULL, *SMALL)}
