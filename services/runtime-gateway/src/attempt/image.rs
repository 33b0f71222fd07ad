//! Images that are artifacts: the directory `rootfs`, and the file `metadata.json` beside it.
//!
//! The metadata has the defaults of the image's processes: environment, user, entrypoint, command,
//! working directory and stop signal. The crate `images` writes it.

use std::collections::{HashSet, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use domain::workload::{Bytes, EnvironmentVariable, WorkloadSpec};
use domain::{Digest, VolumeHandle, error_chain};
use runtime::RuntimeError;
use serde::Deserialize;
use tokio::sync::mpsc;
use transfer::{EntryKind, Manifest};

use crate::transfer::error::ReadVolumeError;
use crate::transfer::{Transfers, read as volume_read};
use crate::util::keyed_locks::lock;

/// Directory of the root file system.
const ROOT: &[u8] = b"rootfs";
const METADATA: &str = "metadata.json";
/// Most bytes of metadata.
const MAX_METADATA_BYTES: u64 = 1 << 20;

/// Default settings of an image for its processes. A workload spec takes precedence.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ProcessDefaults {
    pub(crate) environment: Vec<EnvironmentVariable>,
    pub(crate) user: Option<String>,
    /// Words before those of the command.
    pub(crate) entrypoint: Vec<String>,
    /// Command if the spec has none.
    pub(crate) command: Vec<String>,
    /// Working directory, as an absolute path.
    pub(crate) directory: Option<String>,
    /// Signal that asks the process to end.
    pub(crate) stop_signal: Option<u8>,
}

impl ProcessDefaults {
    /// Returns the command of a process with `spec`. Empty: neither the spec nor the image names a
    /// program.
    pub(crate) fn command_of(&self, spec: &WorkloadSpec) -> Vec<Bytes> {
        let words = |words: &[String]| words.iter().map(|word| word.clone().into_bytes()).collect();
        match &spec.entrypoint {
            Some(entrypoint) => [entrypoint.as_slice(), &spec.command].concat(),
            None if spec.command.is_empty() => [words(&self.entrypoint), words(&self.command)].concat(),
            None => [words(&self.entrypoint), spec.command.clone()].concat(),
        }
    }

    /// Returns the working directory of a process with `spec`.
    pub(crate) fn directory_of(&self, spec: &WorkloadSpec) -> Bytes {
        let of_image = self.directory.as_ref().filter(|_| spec.prefers_image_directory);
        of_image.map_or_else(|| spec.directory.clone(), |directory| directory.clone().into_bytes())
    }
}

/// Default settings of images, cached by the digest of the tree.
#[derive(Debug, Default)]
pub(crate) struct ImageDefaults(Mutex<VecDeque<(Digest, ProcessDefaults)>>);

/// Most images in the cache.
const MAX_IMAGES: usize = 64;

impl ImageDefaults {
    /// Returns the default settings of the image in `volume`, which has the tree of `manifest`.
    pub(crate) async fn load(
        &self,
        transfers: &Transfers,
        volume: VolumeHandle,
        manifest: Arc<Manifest>,
    ) -> Result<ProcessDefaults, RuntimeError> {
        let digest = manifest.tree_digest();
        if let Some(defaults) = self.get(digest) {
            return Ok(defaults);
        }
        let defaults = read(transfers, volume, manifest).await?;
        self.insert(digest, defaults.clone());
        Ok(defaults)
    }

    fn get(&self, digest: Digest) -> Option<ProcessDefaults> {
        lock(&self.0).iter().find(|(cached, _)| *cached == digest).map(|(_, defaults)| defaults.clone())
    }

    fn insert(&self, digest: Digest, defaults: ProcessDefaults) {
        let mut cached = lock(&self.0);
        cached.retain(|(other, _)| *other != digest);
        cached.push_front((digest, defaults));
        cached.truncate(MAX_IMAGES);
    }
}

async fn read(
    transfers: &Transfers,
    volume: VolumeHandle,
    manifest: Arc<Manifest>,
) -> Result<ProcessDefaults, RuntimeError> {
    let kind = |path| manifest.find(path).map(|index| &manifest.entries()[index].kind);
    let invalid = |cause: String| Err(RuntimeError::InvalidImage(cause));
    match kind(ROOT) {
        Some(EntryKind::Directory) => {}
        Some(_) => return invalid("`rootfs` is not a directory".to_owned()),
        None => return invalid("the image has no directory `rootfs`".to_owned()),
    }
    match kind(METADATA.as_bytes()) {
        None => return Ok(ProcessDefaults::default()),
        Some(EntryKind::File { size_bytes, .. }) if *size_bytes <= MAX_METADATA_BYTES => {}
        Some(EntryKind::File { size_bytes, .. }) => {
            return invalid(format!(
                "`{METADATA}` has {size_bytes} bytes, but at most {MAX_METADATA_BYTES} are allowed"
            ));
        }
        Some(_) => return invalid(format!("`{METADATA}` is not a regular file")),
    }
    let (chunks, mut ready) = mpsc::channel(1);
    let reading =
        volume_read::read_file(transfers, volume, manifest.clone(), PathBuf::from(METADATA), chunks);
    let receiving = async {
        let mut text = Vec::new();
        while let Some((_, data)) = ready.recv().await {
            text.extend_from_slice(&data);
        }
        text
    };
    let (read, text) = tokio::join!(reading, receiving);
    read.map_err(|error| match error {
        ReadVolumeError::Worker(error) => error,
        error => {
            RuntimeError::Other(format!("cannot read `{METADATA}` of the image: {}", error_chain(&error)))
        }
    })?;
    parse(&text)
}

#[derive(Deserialize)]
struct Metadata {
    env: Option<Vec<String>>,
    user: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    workdir: Option<String>,
    stop_signal: Option<String>,
}

fn parse(text: &[u8]) -> Result<ProcessDefaults, RuntimeError> {
    let invalid = |cause: String| RuntimeError::InvalidImage(format!("`{METADATA}` is malformed: {cause}"));
    let metadata: Metadata = serde_json::from_slice(text).map_err(|error| invalid(error.to_string()))?;
    let mut environment: Vec<EnvironmentVariable> = Vec::new();
    let mut named = HashSet::new();
    // If a name occurs repeatedly, the last value counts.
    for variable in metadata.env.unwrap_or_default().into_iter().rev() {
        let split = variable.split_once('=').filter(|(name, _)| !name.is_empty() && !variable.contains('\0'));
        let (name, value) = split.ok_or_else(|| invalid(format!("{variable:?} in `env` is not `K=V`")))?;
        if named.insert(name.to_owned()) {
            environment.push(EnvironmentVariable { name: name.into(), value: value.into() });
        }
    }
    environment.reverse();
    let (entrypoint, command) = (metadata.entrypoint.unwrap_or_default(), metadata.cmd.unwrap_or_default());
    if entrypoint.iter().chain(&command).any(|word| word.contains('\0')) {
        return Err(invalid("a word of `entrypoint` or `cmd` has NUL".to_owned()));
    }
    // Builders write relative directories, too. They are relative to the root.
    let directory = metadata.workdir.filter(|directory| !directory.is_empty());
    let directory = directory.map(|directory| format!("/{}", directory.trim_start_matches('/')));
    if directory.as_ref().is_some_and(|it| it.contains('\0') || it.split('/').any(|name| name == "..")) {
        return Err(invalid("`workdir` has `..` or NUL".to_owned()));
    }
    let stop_signal = metadata.stop_signal.filter(|signal| !signal.is_empty());
    let stop_signal = stop_signal.map(|signal| {
        signal_number(&signal).ok_or_else(|| invalid(format!("{signal:?} in `stop_signal` is no signal")))
    });
    Ok(ProcessDefaults {
        environment,
        stop_signal: stop_signal.transpose()?,
        user: metadata.user.filter(|user| !user.is_empty()),
        entrypoint,
        command,
        directory,
    })
}

/// Returns the number of a signal: a number, or a name such as `SIGQUIT`, `QUIT` or `SIGRTMIN+3`.
///
/// Source: signal(7), for the names and for the first and the last real-time signal of glibc.
fn signal_number(text: &str) -> Option<u8> {
    /// The names of the signals from 1 on.
    const NAMES: [&str; 31] = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
        "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
        "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
    ];
    const SYNONYMS: [(&str, &str); 4] = [("IOT", "ABRT"), ("CLD", "CHLD"), ("POLL", "IO"), ("UNUSED", "SYS")];
    const FIRST_REAL_TIME: usize = 34;
    const LAST_REAL_TIME: usize = 64;
    let upper = text.to_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let name = SYNONYMS.iter().find(|(synonym, _)| *synonym == name).map_or(name, |(_, known)| known);
    let named = || NAMES.iter().position(|known| *known == name).map(|at| at + 1);
    let offset =
        |text: &str| Some(text).filter(|text| text.bytes().all(|b| b.is_ascii_digit()))?.parse().ok();
    let real_time = || match (name.strip_prefix("RTMIN"), name.strip_prefix("RTMAX")) {
        (Some(""), _) => Some(FIRST_REAL_TIME),
        (_, Some("")) => Some(LAST_REAL_TIME),
        (Some(after), _) => FIRST_REAL_TIME.checked_add(offset(after.strip_prefix('+')?)?),
        (_, Some(before)) => LAST_REAL_TIME.checked_sub(offset(before.strip_prefix('-')?)?),
        (None, None) => None,
    };
    let number = name.parse().ok().or_else(named).or_else(real_time)?;
    u8::try_from(number).ok().filter(|number| (1..=64).contains(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_signal_is_name_or_number() {
        let numbers = [
            ("SIGQUIT", 3),
            ("term", 15),
            ("10", 10),
            ("SIGRTMIN", 34),
            ("RTMIN+3", 37),
            ("SIGRTMAX-1", 63),
            ("SIGPOLL", 29),
        ];
        for (text, number) in numbers {
            assert_eq!(signal_number(text), Some(number), "{text}");
        }
        for text in ["SIG", "0", "65", "-1", "SIGNONE", "RTMIN3", "RTMIN+31", "RTMIN++3", "RTMAX+1"] {
            assert_eq!(signal_number(text), None, "{text}");
        }
        let parsed = parse(br#"{"stop_signal": "SIGINT"}"#).expect("it makes sense");
        assert_eq!(parsed, ProcessDefaults { stop_signal: Some(2), ..ProcessDefaults::default() });
        assert!(matches!(parse(br#"{"stop_signal": "x"}"#), Err(RuntimeError::InvalidImage(_))));
        assert_eq!(parse(br#"{"stop_signal": ""}"#).expect("it makes sense"), ProcessDefaults::default());
    }

    #[test]
    fn largest_metadata_takes_linear_time() {
        let variables: Vec<_> = (0..60_000).map(|number| format!("\"{number}=\"")).collect();
        let text = format!("{{\"env\":[{}]}}", variables.join(","));
        assert!(text.len() as u64 <= MAX_METADATA_BYTES);
        let began = std::time::Instant::now();
        assert_eq!(parse(text.as_bytes()).expect("understood").environment.len(), variables.len());
        assert!(began.elapsed() < std::time::Duration::from_secs(5), "{:?}", began.elapsed());
    }

    #[test]
    fn hostile_metadata_is_rejected_or_bounded() {
        testing::hostile::each(5000, |draws| {
            let mut names = HashSet::new();
            let mut variable = |at: usize| {
                let name = format!("{at}{}", draws.text(8).replace('=', ""));
                names.insert(name.clone()).then(|| (name, draws.text(20)))
            };
            let variables: Vec<_> = (0..7).filter_map(&mut variable).collect();
            let user = Some(draws.text(9)).filter(|user| !user.is_empty());
            let env: Vec<_> = variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
            let valid = serde_json::json!({ "env": env, "user": user }).to_string().into_bytes();
            let environment = variables
                .into_iter()
                .map(|(name, value)| EnvironmentVariable { name: name.into(), value: value.into() });
            let expected =
                ProcessDefaults { environment: environment.collect(), user, ..ProcessDefaults::default() };
            assert_eq!(parse(&valid).expect("it is valid"), expected);

            let text = draws.changed(&valid);
            if let Ok(parsed) = parse(&text) {
                let sizes = parsed.environment.iter().map(|it| it.name.len() + it.value.len());
                let bytes = sizes.sum::<usize>() + parsed.user.map_or(0, |user| user.len());
                assert!(bytes <= text.len(), "{bytes} of {}", text.len());
            }
        });
    }

    #[test]
    fn metadata_is_parsed_or_rejected() {
        let variable =
            |name: &str, value: &str| EnvironmentVariable { name: name.into(), value: value.into() };
        let text = br#"{"env": ["A=1", "B=x=y", "A=2", "C="], "user": "ann", "other": [1]}"#;
        let expected = vec![variable("B", "x=y"), variable("A", "2"), variable("C", "")];
        let parsed = parse(text).expect("it makes sense");
        let user = Some("ann".to_owned());
        assert_eq!(parsed, ProcessDefaults { environment: expected, user, ..ProcessDefaults::default() });
        for nothing in ["{}", r#"{"env": null, "user": ""}"#, r#"{"env": []}"#] {
            assert_eq!(
                parse(nothing.as_bytes()).expect("it makes sense"),
                ProcessDefaults::default(),
                "{nothing}"
            );
        }
        for malformed in
            ["", "[]", "{", r#"{"env": "A=1"}"#, r#"{"env": ["A"]}"#, r#"{"env": ["=1"]}"#, r#"{"user": 7}"#]
        {
            let refused = parse(malformed.as_bytes());
            assert!(matches!(refused, Err(RuntimeError::InvalidImage(_))), "{malformed}: {refused:?}");
        }
        assert!(parse(br#"{"env": ["A=\u0000"]}"#).is_err());
    }
}
