//! Defaults of an image's processes: from its configuration to `metadata.json`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Content of `metadata.json`: the defaults of an image's processes. `env` and `user` are as in the
/// images of Concourse.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Metadata {
    /// Environment variables: `NAME=VALUE`.
    #[serde(deserialize_with = "or_default")]
    pub env: Vec<String>,
    /// User of the processes: `USER[:GROUP]`, names or ids. Empty: root.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// Words before those of the command.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    /// Command if none is given.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    /// Working directory. Empty: `/`.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub workdir: String,
    /// Signal that asks the process to stop, by name or number. Empty: `SIGTERM`.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub stop_signal: String,
    /// Labels of the image.
    #[serde(deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// Configuration of an image in a registry: the part that concerns processes.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Config {
    #[serde(default)]
    pub(crate) os: String,
    #[serde(default)]
    pub(crate) architecture: String,
    #[serde(default, deserialize_with = "or_default")]
    config: ProcessConfig,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct ProcessConfig {
    #[serde(deserialize_with = "or_default")]
    env: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    user: String,
    #[serde(deserialize_with = "or_default")]
    entrypoint: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    cmd: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    working_dir: String,
    #[serde(deserialize_with = "or_default")]
    stop_signal: String,
    #[serde(deserialize_with = "or_default")]
    labels: BTreeMap<String, String>,
}

/// Reads `null`, which many builders write, as the default.
fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl From<Config> for Metadata {
    fn from(image: Config) -> Self {
        let ProcessConfig { env, user, entrypoint, cmd, working_dir, stop_signal, labels } = image.config;
        Self { env, user, entrypoint, cmd, workdir: working_dir, stop_signal, labels }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_becomes_metadata() {
        let config = r#"{"os": "linux", "architecture": "amd64", "rootfs": {"type": "layers", "diff_ids": []},
            "config": {"Env": ["PATH=/bin"], "User": "7:8", "Entrypoint": ["/init", "-v"], "Cmd": null,
            "WorkingDir": "/srv", "StopSignal": "SIGQUIT", "Labels": {"a": "b"}, "ExposedPorts": {"80/tcp": {}}}}"#;
        let metadata = Metadata::from(serde_json::from_str::<Config>(config).unwrap());
        assert_eq!(
            serde_json::to_string(&metadata).unwrap(),
            r#"{"env":["PATH=/bin"],"user":"7:8","entrypoint":["/init","-v"],"workdir":"/srv","stop_signal":"SIGQUIT","labels":{"a":"b"}}"#
        );
    }

    #[test]
    fn configuration_may_be_missing() {
        for config in [r#"{"config": null}"#, "{}", r#"{"config": {}}"#] {
            let config = serde_json::from_str::<Config>(config).unwrap();
            assert_eq!(Metadata::from(config), Metadata::default());
        }
    }
}
