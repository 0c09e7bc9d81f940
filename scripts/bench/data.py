"""How fast photographs come through data=imagefolder: decoded, and from the cache, against PIL alone.

    python scripts/bench/data.py [--path DIR] [--image-size 224] [--repeats 5] [--quick] [--json FILE]

Rows, in images per second over the same cores:
- PIL alone: one process per core, nothing but open, draft, crop, resize, and the copy into an array; no
  order, no collation, no way to another process. The most that decoding can give.
- data.cache=none: the launcher's batches with as many loader processes, as the training loop receives them.
- from the cache: the same from decoded images (data.cache=DIR).

The contenders take turns, so that they see the same machine. Without --path, 256 photographs of 500 x 375
pixels are made: noise of several sizes, as JPEG of quality 90.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))

from launcher.config.schema import AugmentConfig, DataConfig
from launcher.data.batch_plan import BatchPlan
from launcher.data.images.catalog import ImageSet, load_images
from launcher.data.images.photograph import random_region
from launcher.data.indexed import IndexedData, LoadedBatches
from launcher.data.loader import Loading, loader_processes
from scripts.bench.machine import machine

BATCH = 32
ROUNDS = 4  # epochs over the set within one timing: starting processes is not what is measured


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    with folder_of(arguments) as folder, tempfile.TemporaryDirectory() as cache:
        rates = measure(folder, Path(cache), arguments)
    report(rates, arguments)


def measure(folder: Path, cache: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    size, workers = arguments.image_size, arguments.workers
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".jpg", ".png")]
    contenders: dict[str, Callable[[], float]] = {
        "PIL alone": lambda: pil_alone(files, size, workers),
        "data.cache=none": lambda: batches_per_second(folder, size, "none", workers, arguments.rounds),
        "from the cache": lambda: batches_per_second(folder, size, str(cache), workers, 8 * arguments.rounds),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(arguments.repeats):
        for name, contender in contenders.items():
            rates[name].append(contender())
    return rates


def config(folder: Path, size: int, cache: str) -> DataConfig:
    return DataConfig(
        name="imagefolder",
        path=str(folder),
        batch_size=BATCH,
        micro_batch_size=None,
        val_fraction=0.1,
        num_workers=0,
        max_bad_samples=0,
        drop_last=True,
        augment=AugmentConfig(random_crop_padding=0, random_horizontal_flip=True),
        options={"image_size": size, "cache": cache},
    )


def batches_per_second(folder: Path, size: int, cache: str, workers: int, rounds: int) -> float:
    """Images per second as the training loop gets them: from the second batch on, so without the start."""
    images: ImageSet = load_images(config(folder, size, cache))
    how = Loading(workers=workers, device=torch.device("cpu"), seed=0)
    plan = BatchPlan(len(images.train), BATCH, None, world_size=1, rank=0, seed=0, drop_last=True)
    data = IndexedData(images.train, None, how, "training")  # type: ignore[arg-type]
    steps = plan.steps_per_epoch
    batches = LoadedBatches(data, plan, None, total_steps=rounds * steps)
    with loader_processes():
        batches.step(0, 0)
        began = time.perf_counter()
        seen = 0
        for number in range(1, rounds * steps):
            seen += sum(len(batch["label"]) for batch in batches.step(*divmod(number, steps)))
        return seen / (time.perf_counter() - began)


def pil_alone(files: list[Path], size: int, workers: int) -> float:
    """Images per second of `workers` processes that decode, crop and resize, and keep nothing."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(workers + 1)
    processes = [
        context.Process(target=decode_all, args=(files[part::workers], size, barrier))
        for part in range(workers)
    ]
    for process in processes:
        process.start()
    barrier.wait()
    began = time.perf_counter()
    for process in processes:
        process.join()
    return len(files) / (time.perf_counter() - began)


def decode_all(files: list[Path], size: int, barrier: multiprocessing.synchronize.Barrier) -> None:
    generator = np.random.default_rng(0)
    barrier.wait()
    for file in files:
        with Image.open(file) as image:
            width, height = image.size
            left, top, across, down = random_region(width, height, generator.random(40).tolist(), 0.08)
            image.draft("RGB", (int(width * size / across) + 1, int(height * size / down) + 1))
            by = image.width / width
            box = (left * by, top * by, min((left + across) * by, image.width), (top + down) * by)
            box = (*box[:3], min(box[3], image.height))
            np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=box))


@contextmanager
def folder_of(arguments: argparse.Namespace) -> Iterator[Path]:
    if arguments.path is not None:
        yield arguments.path
        return
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), 160 if arguments.quick else 256)
        yield Path(folder)


def write_photographs(folder: Path, count: int) -> None:
    generator = np.random.default_rng(0)
    for index in range(count):
        target = folder / f"class{index % 2}"
        target.mkdir(exist_ok=True)
        pixels = np.zeros((375, 500, 3), np.float32)
        for side in (4, 16, 64, 250):
            noise = Image.fromarray(generator.integers(0, 64, (side, side, 3), dtype=np.uint8))
            pixels += np.asarray(noise.resize((500, 375), Image.Resampling.BICUBIC))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(target / f"{index}.jpg", quality=90)


def report(rates: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    medians = {name: statistics.median(values) for name, values in rates.items()}
    base = medians["PIL alone"]
    rows = {
        name: {
            "median_images_per_s": medians[name],
            "best_images_per_s": max(values),
            "over_pil": medians[name] / base,
        }
        for name, values in rates.items()
    }
    print(f"{'':26} {'median/s':>9} {'best/s':>9} {'over PIL':>9}   n={arguments.repeats}")
    for name, row in rows.items():
        print(
            f"{name:26} {row['median_images_per_s']:9.0f} {row['best_images_per_s']:9.0f} "
            f"{row['over_pil']:9.2f}"
        )
    content = {
        "what": f"{arguments.workers} processes, {arguments.image_size} pixels, batches of {BATCH}",
        "set": "500 x 375 JPEG, made" if arguments.path is None else arguments.path.name,
        "machine": machine(),
        "repeats": arguments.repeats,
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--path", type=Path, help="a folder of class folders; default: photographs are made")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one repeat: a test of the benchmark itself")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    arguments.rounds = 1 if arguments.quick else ROUNDS
    if arguments.quick:
        arguments.repeats = 1
    return arguments


if __name__ == "__main__":
    main()
