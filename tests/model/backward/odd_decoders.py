"""Small decoders that use their embedding and their blocks in ways that no published family does.

`ways` of a config, any number of them:

    normalised    the embedding normalises its rows before it looks them up, so its graph holds them
    twice         the embedding is called twice, with other tokens
    skips         the output of the embedding is added after the last block
    average       the mean of the outputs of all blocks goes into the norm
    between       a weight outside of the blocks scales what goes from one block to the next
    loops         the blocks are called twice, one round after the other
    unused        the first two blocks see their input without a graph, and nothing depends on the second one
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from tests.model.decoders import VOCAB

WIDTH, BLOCKS = 16, 3


class OddConfig(PreTrainedConfig):
    model_type = "keyhole_odd"

    def __init__(self, ways: str = "", **others: Any) -> None:
        self.ways, self.vocab_size, self.hidden_size = ways, VOCAB, WIDTH
        self.num_hidden_layers, self.num_attention_heads = BLOCKS, 2
        super().__init__(**{"tie_word_embeddings": False, "pad_token_id": 0} | others)


class Normalised(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, F.normalize(self.weight, dim=-1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        y_BTH = self.mix(self.norm(x_BTH))
        return x_BTH + self.out(torch.tanh(y_BTH + F.scaled_dot_product_attention(y_BTH, y_BTH, y_BTH, is_causal=True)))


class Odd(PreTrainedModel):
    config_class, base_model_prefix, _supports_sdpa = OddConfig, "model", True

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)


class OddModel(Odd):
    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        kind = Normalised if "normalised" in config.ways else nn.Embedding
        self.embed, self.norm = kind(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, **_: Any) -> BaseModelOutput:
        ways = self.config.ways
        x = rows = self.embed(input_ids)
        x = x + self.embed(input_ids.flip(1)) if "twice" in ways else x
        outputs = []
        for layer in [*self.layers] * (2 if "loops" in ways else 1):
            x = x * self.scale if "between" in ways and outputs else x
            if "unused" in ways and len(outputs) == 1:
                layer(x)
            outputs.append(x := layer(x))
            x = x.detach() if "unused" in ways and len(outputs) == 2 else x
        x = torch.stack(outputs).mean(0) if "average" in ways else x
        x = x + rows * self.scale if "skips" in ways else x
        return BaseModelOutput(last_hidden_state=self.norm(x))


class OddForCausalLM(Odd):
    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.model, self.lm_head = OddModel(config), nn.Linear(WIDTH, VOCAB, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_decoder(self) -> nn.Module:
        return self.model

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, **_: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids=input_ids).last_hidden_state))


AutoConfig.register(OddConfig.model_type, OddConfig)
AutoModelForCausalLM.register(OddConfig, OddForCausalLM)
