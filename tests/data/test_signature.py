"""Signed bundles: whatever is edited is noticed, and whoever asks for a signer gets no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from private_rlhf.cli import main
from private_rlhf.core.atomic import write_json
from private_rlhf.core.errors import UserError
from private_rlhf.data.container import settle
from private_rlhf.data.curate import Request, privatize_source
from private_rlhf.data.raw_source import RawSource
from private_rlhf.data.release import read_release
from private_rlhf.data.release_import import import_bundle
from private_rlhf.privacy.keys import insecure_seed_key, keygen, load_key
from private_rlhf.privacy.signatures import public_key, sign, verify
from private_rlhf.recipe import Recipe
from pyarrow import parquet
from support.recipes import recipe_of

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture
def bundle(tmp_path: Path, key: Path) -> Path:
    lines = [json.dumps({"prompt": f"Say {i}.", "chosen": f"yes {i}", "rejected": f"no {i}"}) for i in range(20)]
    (tmp_path / "raw.jsonl").write_text("\n".join(lines) + "\n")
    privatize_source(Request(str(tmp_path / "raw.jsonl"), tmp_path / "bundle", 1.0, key))
    return tmp_path / "bundle"


def edited(bundle: Path, **changes: Any) -> None:
    path = bundle / "_signature"
    write_json(path, json.loads(path.read_text()) | changes)


def recipe(source: Path, signer: str | None = None) -> Recipe:
    data = {"preferences": str(source)} | ({"signer": signer} if signer else {})
    return recipe_of(data=data, privatize={"epsilon": 1.0, "key_file": "none.key"})


def test_a_release_is_signed_and_anyone_can_check_it_by_the_documented_message(bundle: Path, key: Path) -> None:
    """Without our `verify`: docs/how-to/keys.md says what is signed."""
    stated = json.loads((bundle / "_signature").read_text())
    assert read_release(bundle).signer == stated["public_key"] == public_key(load_key(key))
    text = json.dumps(stated["files"], sort_keys=True, separators=(",", ":"))
    message = b"private-rlhf/release-signature/v1\n" + text.encode()
    reader = Ed25519PublicKey.from_public_bytes(bytes.fromhex(stated["public_key"]))
    reader.verify(bytes.fromhex(stated["signature"]), message)
    with pytest.raises(InvalidSignature):
        reader.verify(bytes.fromhex(stated["signature"]), message + b" ")


def test_the_manifest_s_words_and_numbers_are_signed(bundle: Path) -> None:
    path = bundle / "_manifest"
    path.write_text(path.read_text().replace('"raw.jsonl"', '"census"'))
    with pytest.raises(UserError, match=r"'_manifest' is not what was signed: the bundle was edited or damaged"):
        read_release(bundle)


def test_rows_are_signed(bundle: Path, tmp_path: Path, key: Path) -> None:
    """Sound rows of another release of the same pairs, put in place of these."""
    privatize_source(Request(str(tmp_path / "raw.jsonl"), tmp_path / "other", 0.5, key))
    (bundle / "part-00000.parquet").write_bytes((tmp_path / "other" / "part-00000.parquet").read_bytes())
    with pytest.raises(UserError, match=r"part-00000\.parquet' is not what was signed"):
        read_release(bundle)


@pytest.mark.parametrize(
    "changes",
    [
        {"schema_version": 2},
        {"algorithm": "none"},
        {"public_key": None},
        {"public_key": "00" * 32},
        {"public_key": "ff" * 32},
        {"signature": "0" * 128},
        {"signature": ""},
        {"files": {}},
        {"files": None},
    ],
    ids=str,
)
def test_a_signature_that_does_not_hold_is_refused(bundle: Path, changes: dict[str, Any]) -> None:
    edited(bundle, **changes)
    with pytest.raises(UserError, match=r"_signature: .*; write it again"):
        read_release(bundle)


@pytest.mark.parametrize("text", ["[]", "{", "1", "null"])
def test_a_signature_file_that_is_none_is_refused(bundle: Path, text: str) -> None:
    (bundle / "_signature").write_text(text)
    with pytest.raises(UserError, match=r"_signature: "):
        read_release(bundle)


def take_over(recipe: Recipe, folder: Path) -> dict[str, Any]:
    return import_bundle(recipe.data, recipe.privatize, recipe.evaluation_labels, folder)


def test_whoever_edits_can_sign_but_not_as_the_holder(bundle: Path, tmp_path: Path, key: Path) -> None:
    """An edited bundle under a signature of its editor's: sound in itself, and not the one that was asked for."""
    stranger, holder = load_key(keygen(tmp_path / "stranger.key")), public_key(load_key(key))
    files = json.loads((bundle / "_signature").read_text())["files"]
    write_json(bundle / "_signature", sign(stranger, files))
    assert read_release(bundle).signer == public_key(stranger) != holder
    with pytest.raises(UserError, match=r"data\.signer is"):
        take_over(recipe(bundle, holder), tmp_path / "stage")


def test_an_unsigned_bundle_opens_and_says_so(bundle: Path, tmp_path: Path, key: Path) -> None:
    holder = public_key(load_key(key))
    assert take_over(recipe(bundle, holder), tmp_path / "stage")["signer"] == holder
    (bundle / "_signature").unlink()
    report = take_over(recipe(bundle), tmp_path / "stage")
    assert report["signer"] is None
    assert "signed by NOBODY" in report["summary"]
    with pytest.raises(UserError, match=r"is signed by nobody, and data\.signer is"):
        take_over(recipe(bundle, holder), tmp_path / "stage")


def test_a_signer_is_asked_of_whatever_stands_in_the_place_of_a_bundle(bundle: Path, tmp_path: Path, key: Path) -> None:
    """Without its manifest and ids a bundle is raw pairs, which nobody signs: they were read, and drawn anew."""
    holder = public_key(load_key(key))
    rows = parquet.read_table(bundle / "part-00000.parquet", columns=["prompt", "chosen", "rejected"])
    shutil.rmtree(bundle)
    bundle.mkdir()
    parquet.write_table(rows, bundle / "part-00000.parquet")
    asked = recipe(bundle, holder)
    with pytest.raises(UserError, match=r"must be a bundle of data\.signer, got bundle: give it"):
        RawSource(asked.data, asked.privatize, tmp_path / "run").check_input(asked.evaluation_labels)
    with pytest.raises(UserError, match=r"signer must go with preferences that are brought"):
        recipe(Path("embedded"), holder)


def test_a_release_of_before_gets_its_signature_by_the_same_command(bundle: Path, tmp_path: Path, key: Path) -> None:
    signature = bundle / "_signature"
    before = signature.read_text()
    signature.unlink()
    privatize_source(Request(str(tmp_path / "raw.jsonl"), bundle, 1.0, key))
    assert signature.read_text() == before  # deterministic
    assert read_release(bundle).signer


def test_the_command(bundle: Path, tmp_path: Path, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "show", "--key", str(key)]) == 0
    signer = next(line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith("signs"))
    assert main(["verify-release", str(bundle), "--signer", signer]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{bundle}: 20 labels at ε = 1, signed by {signer}; who must be trusted: whoever holds the")
    assert main(["verify-release", str(bundle), "--signer", "0" * 64]) == 2
    assert "is signed by" in capsys.readouterr().err
    assert main(["verify-release", str(bundle), "--signer", "me"]) == 2
    assert "64 hexadecimal digits" in capsys.readouterr().err
    (bundle / "_signature").unlink()
    settle(bundle)
    assert main(["verify-release", str(bundle)]) == 0
    assert "unsigned: nobody vouches for it" in capsys.readouterr().out


def test_a_seed_s_key_signs_nothing() -> None:
    assert public_key(insecure_seed_key(1)) is None


def test_keys_sign_differently_and_a_signature_is_of_its_files(tmp_path: Path, key: Path) -> None:
    one, two = load_key(key), load_key(keygen(tmp_path / "two.key"))
    files = {"_manifest": "0" * 64}
    assert verify(sign(one, files), files) == public_key(one) != public_key(two)
    assert one.keyed_digest(()) != public_key(one)
    with pytest.raises(ValueError, match="does not verify"):
        verify(sign(one, files) | {"public_key": public_key(two)}, files)


def small_order_keys() -> list[str]:
    """All encodings of the points whose order divides 8, by arithmetic on the curve: eight of them, and those that
    are not reduced or give 0 a sign."""
    p = 2**255 - 19
    d = -121665 * pow(121666, -1, p) % p
    root = pow(2, (p - 1) // 4, p)

    def x_of(y: int) -> list[int]:
        square = (y * y - 1) * pow(d * y * y + 1, -1, p) % p
        x = pow(square, (p + 3) // 8, p)
        return [x * r % p for r in (1, root) if (x * r) ** 2 % p == square]

    def double(x: int, y: int) -> tuple[int, int]:
        xx, yy = x * x % p, y * y % p
        return 2 * x * y * pow(yy - xx, -1, p) % p, (yy + xx) * pow(2 + xx - yy, -1, p) % p

    halves = [y for r in (1, root) for y in _roots_of_order_8(d, p, r)]
    reduced = {0, 1, p - 1, *halves}
    for y in reduced:
        point = (x_of(y)[0], y)
        for _ in range(3):
            point = double(*point)
        assert point == (0, 1)
    assert len(reduced) == 5
    spelled = {y + k * p for y in reduced for k in (0, 1) if y + k * p < 1 << 255}
    return [(y | sign << 255).to_bytes(32, "little").hex() for y in sorted(spelled) for sign in (0, 1)]


def _roots_of_order_8(d: int, p: int, r: int) -> list[int]:
    """y with d y⁴ + 2y² = 1."""
    s = pow(1 + d, (p + 3) // 8, p) * r % p
    if (s * s - 1 - d) % p:
        return []
    found = []
    for square in ((-1 + s) * pow(d, -1, p) % p, (-1 - s) * pow(d, -1, p) % p):
        for q in (1, pow(2, (p - 1) // 4, p)):
            y = pow(square, (p + 3) // 8, p) * q % p
            if y * y % p == square:
                found += [y, p - y]
    return found


def test_public_keys_of_small_order_are_refused(key: Path) -> None:
    """Under the identity one constant is a signature of everything."""
    weak = small_order_keys()
    assert "01" + "00" * 31 in weak
    assert len(weak) == 14
    files = {"_manifest": "0" * 64}
    stated = sign(load_key(key), files)
    for public in weak:
        with pytest.raises(ValueError, match="of small order"):
            verify(stated | {"public_key": public, "signature": public + "00" * 32}, files)
    assert verify(stated, files)
