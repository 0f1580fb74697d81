"""A damaged file is an error or the last state; never wrong bytes, never the end of the interpreter."""

import json
import subprocess
import sys

import pytest

from kvstore.errors import CorruptBlockError, CorruptStoreError
from kvstore.storage.lmdb_tier import LmdbTier
from tests.storage.builders import SETTINGS, noise, opaque
from tests.storage.damage_child import RECORDS, fill
from tests.storage.processes import ROOT


def damage(folder, mode):
    """Run the child, which no signal may end; return its counts."""
    command = [sys.executable, "-m", "tests.storage.damage_child", str(folder), mode]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=300)
    assert done.returncode == 0, f"{done.returncode}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout)


def test_a_file_cut_off_anywhere_is_refused(tmp_path):
    found = damage(tmp_path, "truncated")
    assert found.pop("CorruptStoreError") > 200
    assert found.pop("one bad record") > 10  # it lost its end
    assert set(found) <= {"whole"}  # what was cut off was free


@pytest.mark.parametrize("mode", ["flipped", "torn", pytest.param("flipped everywhere", marks=pytest.mark.slow)])
def test_flipped_bits_and_lost_pages_never_give_wrong_bytes(tmp_path, mode):
    found = damage(tmp_path, mode)
    assert found["CorruptStoreError"] > 20
    assert found["one bad record"] > 20
    assert found.get("missed", 0) <= sum(found.values()) / 100  # the bit was in a key


def test_a_flipped_bit_in_a_payload_is_one_bad_record(tmp_path):
    with LmdbTier(tmp_path, SETTINGS) as tier:
        tier.put_many([opaque(0, 20_000), opaque(1, 20_000)])
    path = tmp_path / "spill-000001.mdb"
    data = bytearray(path.read_bytes())
    data[data.index(noise(20_000, 0)[5000:5020])] ^= 4
    path.write_bytes(data)
    with LmdbTier(tmp_path, SETTINGS) as tier:
        with pytest.raises(CorruptBlockError, match=r"TOKENS .* number 0: its checksum is"):
            tier.get_many([opaque(0).key])
        assert tier.get_many([opaque(1).key]) == [opaque(1, 20_000)]
        tier.put_many([opaque(0)])
        tier._check()


def test_payloads_that_were_swapped_are_two_bad_records(tmp_path):
    with LmdbTier(tmp_path, SETTINGS) as tier:
        tier.put_many([opaque(0, 8192 - 96, sequence=b"a" * 16), opaque(0, 8192 - 96, seed=9, sequence=b"b" * 16)])
    path = tmp_path / "spill-000001.mdb"
    data = path.read_bytes()
    one, two = (data.index(noise(8192 - 96, seed)) - 72 for seed in (0, 9))
    size = 8192 - 16
    swapped = bytearray(data)
    swapped[one : one + size], swapped[two : two + size] = data[two : two + size], data[one : one + size]
    path.write_bytes(swapped)
    with LmdbTier(tmp_path, SETTINGS) as tier:
        for sequence in (b"a" * 16, b"b" * 16):
            with pytest.raises(CorruptBlockError, match="checksum"):
                tier.get_many([opaque(0, sequence=sequence).key])


def test_a_file_that_lost_inner_pages_says_so(tmp_path):
    with LmdbTier(tmp_path, SETTINGS) as tier:
        tier.put_many([opaque(0, 100_000)])
    path = tmp_path / "spill-000001.mdb"
    path.write_bytes(path.read_bytes()[: 3 * 4096])
    for options in ({"settings": SETTINGS}, {"readonly": True}):
        with pytest.raises(CorruptStoreError, match=r"is damaged .*beyond EOF.*; restore or remove it"):
            LmdbTier(tmp_path, **options)


def test_a_record_that_lost_its_end_is_one_bad_record(tmp_path):
    """The verifier passes such a file, and reading it as it is would kill the process."""
    path = fill(tmp_path)
    data = path.read_bytes()
    start, bad = max((data.rindex(bytes(record.payload[:64])), record) for record in RECORDS if record.n_bytes > 9000)
    path.write_bytes(data[: (start + len(bad.payload) - 1) // 4096 * 4096])
    with pytest.raises(CorruptStoreError, match="open it once to write"):
        LmdbTier(tmp_path, readonly=True)
    for options in ({"settings": SETTINGS}, {"readonly": True}):
        with LmdbTier(tmp_path, **options) as tier:
            with pytest.raises(CorruptBlockError, match="checksum"):
                tier.get_many([bad.key])
            rest = [record for record in RECORDS if record is not bad]
            assert tier.get_many(record.key for record in rest) == rest
            tier._check()
