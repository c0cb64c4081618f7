"""The batch that launch/first_run/check_first_loss.py rebuilds is the first one that megatron-core's GPTDataset
gives."""
import logging

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

import check_first_loss

SEQ_LENGTH, BATCH, STEPS, SEED = 16, 4, 5, 1234


class Tokenizer:
    vocab_size = 1 << 15
    eod = 0
    unique_identifiers = {"class": "Tokenizer"}


def test_first_batch_is_megatrons(tmp_path):
    logging.getLogger("megatron").setLevel(logging.ERROR)
    prefix = str(tmp_path / "text_document")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=numpy.uint16)
    for length in [5, 300, 17, 1, 64, 250]:
        builder.add_item(torch.randint(1, 1 << 15, (length,), generator=torch.Generator().manual_seed(length)))
        builder.end_document()
    builder.finalize(prefix + ".idx")

    config = GPTDatasetConfig(random_seed=SEED, sequence_length=SEQ_LENGTH, tokenizer=Tokenizer(),
                              blend=([prefix], None), split="100,0,0", path_to_cache=str(tmp_path / "cache"),
                              reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
                              create_attention_mask=False)
    theirs = BlendedMegatronDatasetBuilder(GPTDataset, [BATCH * STEPS, 0, 0], lambda: True, config).build()[0]
    expected = numpy.stack([theirs._query_document_sample_shuffle_indices(index)[0] for index in range(BATCH)])

    got = check_first_loss.first_batch(check_first_loss.read_documents(prefix), SEQ_LENGTH, BATCH, SEED)
    assert (got == expected).all()
