"""Hardware figures carry their source, and this machine is read without importing torch."""

import re
import subprocess
import sys

import pytest

from shardwise import hardware
from shardwise.errors import UsageError
from shardwise.spec import Cluster, make_cluster


@pytest.mark.parametrize("device", hardware.DEVICES.values(), ids=str)
def test_every_device_has_a_plausible_size_and_a_dated_source(device):
    assert 10 * 2**30 < device.total_bytes < 300 * 2**30
    assert re.search(r"\(20\d\d-\d\d\)", device.source)
    named = int(re.search(r"-(\d+)gb", device.name)[1])
    assert 0.9 * named * 10**9 < device.total_bytes <= named * 2**30


def test_this_machine_is_read_without_torch():
    code = "import sys; from shardwise import hardware, spec; hardware.this_machine('cpu'); spec.make_cluster(device='cpu'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_ranks_on_a_cpu_share_its_memory():
    one, four = make_cluster(device="cpu", gpus_per_node=1), make_cluster(device="cpu", gpus_per_node=4)
    assert one.kind == "cpu" and one.world_size == 1 and four.world_size == 4
    assert four.device_total_bytes == pytest.approx(one.device_total_bytes / 4, rel=0.2)


def test_memory_gib_takes_the_place_of_the_table():
    assert make_cluster(device="h100-80gb", memory_gib=60.5, gpus_per_node=4).device_total_bytes == round(60.5 * 2**30)


def test_an_unknown_device_is_refused_with_the_nearest_and_the_list():
    with pytest.raises(UsageError) as caught:
        make_cluster(device="h100", where="`--device h100`")
    assert (
        caught.value.text()
        == """\
error: `h100` is none of the 12 devices shardwise knows
  known: cpu, a100-40gb, a100-80gb, b200-192gb, h100-80gb,
         h100-96gb, h200-141gb, l40s-48gb, mi300x-192gb,
         rtx3090-24gb, rtx4090-24gb, v100-16gb, v100-32gb
  where: `--device h100`

hint: `--device h100-80gb or h100-96gb`"""
    )


def test_a_cluster_survives_json():
    cluster = make_cluster(nodes=2, gpus_per_node=8, device="a100-80gb")
    assert Cluster.from_json(cluster.to_json()) == cluster and cluster.to_json()["world_size"] == 16
