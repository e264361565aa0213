"""Settings: strict, in one sentence, and each in one place."""

from dataclasses import dataclass

import pytest

from esper.leyline import ConfigError
from esper.observatory.run_directory import to_toml
from esper.simic.agent.config import PPOConfig
from esper.simic.rewards.config import ContributionRewardConfig
from esper.simic.training import config as config_module
from esper.simic.training.config import DEFAULT_PPO, PRESETS, TrainingConfig, load_config
from training_support import tiny_config


def load(tmp_path, text, **flags):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_config(path, flags)


def test_flags_win_over_the_file_over_the_preset_over_defaults(tmp_path):
    text = 'task = "digits"\nrounds = 7\n[ppo]\nlearning_rate = 0.5\nclip_ratio = 0.3'
    config = load(tmp_path, text, **{"rounds": 9, "ppo.learning_rate": 0.25, "envs": None})
    assert (config.rounds, config.ppo.learning_rate, config.ppo.clip_ratio) == (9, 0.25, 0.3)
    assert config.envs == TrainingConfig().envs
    assert config.ppo.entropy_coef == PRESETS["digits"]["ppo.entropy_coef"]


@pytest.mark.parametrize("task", PRESETS)
def test_every_preset_is_a_config(task):
    assert load_config(flags={"task": task}).task == task


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("roundz = 3", r"no setting roundz; did you mean rounds\?"),
        ("[ppo]\nlearning_rat = 3", r"no setting ppo.learning_rat; did you mean ppo.learning_rate"),
        ("[network]\nwidth = 3", "no setting network.width"),
        ("[network.op_bias]\nWAITS = 3", r"no setting network.op_bias.WAITS; .*op_bias.WAIT\?"),
        ("[reward]\nparam_costs = 3", r"did you mean reward.param_cost\?"),
        ("rounds = 'many'", "rounds .*'many'"),
        ("rounds = true", "rounds .*True"),
        ("rounds = 0", "rounds"),
        ("[ppo]\nlearning_rate = 'fast'", "ppo.learning_rate"),
        ("[ppo]\ntarget_kl = inf", "ppo.target_kl .*inf"),
        ("[ppo]\nlearning_rate = -1.0", "learning_rate"),
        ("[ppo]\nvalue_loss = 'l1'", "value_loss .*'mse'"),
        ("ppo = 3", "ppo"),
        ("gamma = 0.9", "no setting gamma"),
        ("[reward]\ngamma = 0.5", "gamma=0.5"),
        ("reward_mode = 'shapd'", r"no reward mode 'shapd'.*did you mean shaped\?"),
        ("reward_mode = 'loss'\ntask = 'mine'", "needs reward.baseline_loss"),
        ("[growth]\nincubation = 'warm'", "incubation"),
        ("growth.population = 'big'", "population .*'big'"),
        ("[growth]\nprecision = 'fp8'", "precision .*'fp8'"),
        ("[growth.budget]\nparams = 0.5", "params"),
        ("rounds = ", "TOML"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(tmp_path, text, sentence):
    with pytest.raises(ConfigError, match=sentence) as error:
        load(tmp_path, text)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.toml")


def test_with_a_warm_start_the_critic_learns_first_unless_told_otherwise():
    assert load_config().ppo.critic_first == 0
    assert load_config(flags={"warm_start": "runs/cloned"}).ppo.critic_first == 4
    flags = {"warm_start": "runs/cloned", "ppo.critic_first": 0}
    assert load_config(flags=flags).ppo.critic_first == 0


def test_a_config_file_is_data(tmp_path):
    with pytest.raises(ConfigError):
        load(tmp_path, "task = __import__('os').system('touch executed')")
    config = load(tmp_path, "task = \"__import__('os').abort()\"")
    assert config.task == "__import__('os').abort()"


def test_a_config_survives_its_file(tmp_path):
    flags = {"reward.param_cost": 0.5, "ppo.target_kl": 0.5, "anomalies.patience": 3}
    config = tiny_config(**flags)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config.flat()))
    assert load_config(path, presets=False) == config


def test_settings_of_a_reward_go_to_its_family():
    assert tiny_config(**{"reward.param_cost": 0.5}).reward_config.param_cost == 0.5
    shaped = tiny_config(reward_mode="shaped", **{"reward.rent_weight": 2.0}).reward_config
    assert isinstance(shaped, ContributionRewardConfig)
    assert (shaped.mode, shaped.rent_weight) == ("shaped", 2.0)
    with pytest.raises(ConfigError, match=r"no setting reward\.rent_weight"):
        tiny_config(**{"reward.rent_weight": 2.0})


@pytest.mark.parametrize("mode", ["objective", "shaped", "simplified", "loss"])
def test_004_c1_a_run_whose_reward_names_another_gamma_does_not_start(mode):
    losses = {"reward.baseline_loss": 2.3, "reward.target_loss": 0.3}
    losses["reward.typical_loss_delta_std"] = 0.1
    flags = {"reward_mode": mode, "ppo.gamma": 0.99, **(losses if mode == "loss" else {})}
    assert tiny_config(**flags, **{"reward.gamma": 0.99}).ppo.gamma == 0.99
    with pytest.raises(ConfigError, match=r"gamma=0\.995 but the run uses gamma=0\.99;"):
        tiny_config(**flags, **{"reward.gamma": 0.995})


@dataclass(frozen=True)
class PatientPPO(PPOConfig):
    patience: int | None = None


@dataclass(frozen=True)
class WiderConfig(TrainingConfig):
    """A setting is added by its line: name, type and default."""

    curriculum: str = "none"
    ppo: PatientPPO = PatientPPO(**vars(DEFAULT_PPO))


def test_a_field_is_all_that_a_new_setting_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(config_module, "TrainingConfig", WiderConfig)
    config = load(tmp_path, "[ppo]\npatience = 3", curriculum="slow")
    assert (config.curriculum, config.ppo.patience) == ("slow", 3)
    assert config.ppo.entropy_coef == PRESETS["digits"]["ppo.entropy_coef"]
    assert {"curriculum": "slow", "ppo.patience": 3}.items() <= config.flat().items()
    for text, sentence in {
        "curriculum = 3": "curriculum must be text, got 3",
        "curriculun = 'slow'": r"no setting curriculun; did you mean curriculum\?",
        "[ppo]\npatience = 'long'": "ppo.patience must be a whole number, got 'long'",
        "[ppo]\npatienc = 3": r"no setting ppo.patienc; did you mean ppo.patience\?",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            load(tmp_path, text)


def test_a_network_over_sets_is_smaller_unless_told_otherwise():
    sizes = load_config(flags={"network.kind": "set"}).network
    assert (sizes.kind, sizes.feature_dim, sizes.lstm_hidden_dim) == ("set", 64, 64)
    wide = load_config(flags={"network.kind": "set", "network.lstm_hidden_dim": 96}).network
    assert (wide.feature_dim, wide.lstm_hidden_dim) == (64, 96)
    assert load_config().network.lstm_hidden_dim == 128
    with pytest.raises(ConfigError, match=r"network.kind must be 'flat' or 'set', got 'graph'"):
        load_config(flags={"network.kind": "graph"})
