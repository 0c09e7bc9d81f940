"""Transforms of batches of images."""

import pytest
import torch

from launcher.config.schema import AugmentConfig
from launcher.data.images.registry import ImageSet
from launcher.data.tensors import TensorData


@pytest.mark.parametrize("random_crop_padding", [0, 1])
def test_a_column_called_region_is_left_alone_where_nothing_is_cut(random_crop_padding):
    batch = {"image": torch.full((2, 1, 4, 4), 255, dtype=torch.uint8), "region": torch.arange(2)}
    images = ImageSet(TensorData(batch), TensorData(batch), ("a", "b"), (0.5,), (0.5,))
    train = images.train_transform(
        AugmentConfig(random_crop_padding=random_crop_padding, random_horizontal_flip=True)
    )
    for made in (train(batch), images.eval_transform()(batch)):
        assert made["image"].shape == (2, 1, 4, 4)
        assert made["region"].tolist() == [0, 1]
