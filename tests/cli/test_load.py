"""Settings: file, environment, flags, in that order, and nothing unknown gets through."""

import json
from pathlib import Path

import pytest

from cli.load import ConfigError, ServeConfig, load
from cli.load_role import EncoderDeployment, load_any
from cli.settings_view import as_json
from epd.types import Role


def load_with(tmp_path: Path, *, toml: str = "", environ: dict[str, str] | None = None, **flags: object) -> ServeConfig:
    file = None
    if toml:
        file = tmp_path / "deployment.toml"
        file.write_text(toml)
    return load(runtime_dir=tmp_path, file=file, environ=environ or {}, flags=flags)


def test_defaults_are_one_process_per_stage(tmp_path: Path) -> None:
    config = load_with(tmp_path)
    assert config.mode == "epd"
    assert [engine.role for engine in config.prefill + config.decode] == [Role.PREFILL, Role.DECODE]
    assert config.gateway.host == "127.0.0.1"
    assert len(config.gateway.encoders) == len(config.encoders) == 1


def test_joined_modes_have_no_decode_stage(tmp_path: Path) -> None:
    for mode in ("e-pd", "unified"):
        config = load_with(tmp_path, mode=mode)
        assert config.decode == config.gateway.decode == ()
        assert config.prefill[0].role == Role.BOTH


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    toml = "[gateway]\nport = 1\n[engine]\npage_size = 8\nchunk_tokens = 100\n"
    environ = {"MIMO_GATEWAY__PORT": "2", "MIMO_ENGINE__PAGE_SIZE": "32"}
    config = load_with(tmp_path, toml=toml, environ=environ, gateway={"port": "3"})
    assert config.gateway.port == 3
    assert config.prefill[0].page_size == 32
    assert config.prefill[0].chunk_tokens == 100


def test_weights_have_a_storage_of_their_own(tmp_path: Path) -> None:
    toml = "[engine]\nweights = 'keep'\nqkv_layout = 'plain'\n[decode]\nweights = 'bfloat16'\n"
    prefill, decode = (
        engines[0] for engines in (load_with(tmp_path, toml=toml).prefill, load_with(tmp_path, toml=toml).decode)
    )
    assert (prefill.weights, prefill.qkv_layout, prefill.dtype) == ("keep", "plain", "float32")
    assert (decode.weights, decode.qkv_layout, decode.dtype) == ("bfloat16", "plain", "float32")
    assert load_with(tmp_path).prefill[0].weights is None
    assert load_with(tmp_path, toml=toml, environ={"MIMO_DECODE__WEIGHTS": "null"}).decode[0].weights is None


def test_stage_section_overrides_engine_for_its_role(tmp_path: Path) -> None:
    toml = "[engine]\nmax_running = 4\n[decode]\nmax_running = 64\nreplicas = 2\n"
    config = load_with(tmp_path, toml=toml)
    assert [engine.max_running for engine in config.prefill + config.decode] == [4, 64, 64]
    assert len(set(config.gateway.decode)) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"toml": "[gateway]\nprot = 1\n"}, ["gateway.prot", "port"]),
        ({"toml": "[gatway]\nport = 1\n"}, ["gatway", "[gateway]"]),
        ({"toml": "[gateway]\nport = 'many'\n"}, ["gateway.port", "many"]),
        ({"toml": "[gateway]\nport = 70000\n"}, ["port", "70000", "65535"]),
        ({"toml": "[engine]\npage_size = 0\n"}, ["page_size", "0"]),
        ({"toml": "gateway = 3\n"}, ["gateway", "section"]),
        ({"toml": "[gateway\n"}, ["deployment.toml"]),
        ({"environ": {"MIMO_GATEWAY__HSOT": "x"}}, ["gateway.hsot", "host"]),
        ({"mode": "epdd"}, ["epdd", "e-pd", "unified"]),
        ({"model": "no-such-model"}, ["no-such-model", "mimo-nano"]),
        ({"encoder": {"replicas": 0}}, ["encoder.replicas", "0", "64"]),
        ({"engine": {"page_size": "7.5"}}, ["engine.page_size", "7.5"]),
        ({"engine": {"weights": "int4"}}, ["engine.weights", "int4", "bfloat16, float32, keep"]),
        ({"decode": {"qkv_layout": "guess"}}, ["decode.qkv_layout", "guess", "auto, interleaved, plain"]),
        ({"fetch": {"media_roots": ["/no/such/directory"]}}, ["media_roots", "/no/such/directory"]),
        ({"mode": "unified", "encoder": {"replicas": 2}}, ["encoder.replicas", "2", "unified"]),
        ({"mode": "e-pd", "decode": {"max_running": 2}}, ["decode.max_running", "e-pd"]),
        ({"gateway": {"drain_s": 20}}, ["supervisor.drain_s", "gateway.drain_s", "20"]),
        ({"gateway": {"encoders": ["tcp://elsewhere"]}}, ["gateway.encoders"]),
    ],
)
def test_refusals_name_key_value_and_what_is_allowed(
    tmp_path: Path, settings: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_with(tmp_path, **settings)  # type: ignore[arg-type]
    for word in words:
        assert word in str(refused.value)


def test_what_a_file_sets_for_a_stage_that_is_not_there_is_said_to_be_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decode\.replicas is set in epd, but mode unified has no decode stage"):
        load(runtime_dir=tmp_path, file=Path("epd"), environ={}, flags={"mode": "unified"})


def test_shipped_configurations_load(tmp_path: Path) -> None:
    for name in ("epd", "e-pd", "unified"):
        assert load(runtime_dir=tmp_path, file=Path(name), environ={}).mode == name


def test_missing_configuration_names_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope.*epd"):
        load(runtime_dir=tmp_path, file=Path("nope"), environ={})


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("k1", ("k1",)),
        ("k1,k2", ("k1", "k2")),
        (" k1 , k2 ", ("k1", "k2")),
        ("k:1", ("k:1",)),
        ('["k1", "k,2 "]', ("k1", "k,2 ")),
        ("[]", ()),
        ("", ()),
    ],
)
def test_a_list_in_a_text_is_parted_by_commas_or_is_json(tmp_path: Path, text: str, items: tuple[str, ...]) -> None:
    for settings in ({"environ": {"MIMO_GATEWAY__API_KEYS": text}}, {"gateway": {"api_keys": text}}):
        assert load_with(tmp_path, **settings).gateway.api_keys == items  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["k1,,k2", "k1,", ",", '["k1"', "[k1]", '["k1", 2]', '["k1", ""]', '[["k1"]]', '["k"]x']
)
def test_another_list_in_a_text_is_refused_and_no_key_is_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.api_keys") as refused:
        load_with(tmp_path, environ={"MIMO_GATEWAY__API_KEYS": text})
    assert "k1" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_all_lists_are_read_alike(tmp_path: Path) -> None:
    roots = [tmp_path / "a, b", tmp_path / "c"]
    for root in roots:
        root.mkdir()
    by_json = json.dumps([str(root) for root in roots])
    assert load_with(tmp_path, fetch={"media_roots": by_json}).gateway.fetch.media_roots == tuple(roots)
    by_comma = f"{roots[1]},{tmp_path}"
    assert load_with(tmp_path, fetch={"media_roots": by_comma}).gateway.fetch.media_roots == (roots[1], tmp_path)
    for text in ("10.0.0.0/8,fd00::/8", '["10.0.0.0/8", "fd00::/8"]'):
        flags = {"role": "encoder", "sglang": {"receiver_networks": text, "register_urls": "http://a:1, http://b:2"}}
        alone = load_any(runtime_dir=tmp_path, environ={}, flags=flags)
        assert isinstance(alone, EncoderDeployment)
        assert alone.sglang.receiver_networks == ("10.0.0.0/8", "fd00::/8")
        assert alone.sglang.register_urls == ("http://a:1", "http://b:2")


def test_printed_settings_hide_api_keys(tmp_path: Path) -> None:
    config = load_with(tmp_path, environ={"MIMO_GATEWAY__API_KEYS": "hush-1,hush-2"})
    assert config.gateway.api_keys == ("hush-1", "hush-2")
    assert "hush" not in as_json(config)
