//! Values on the command line: inputs, outputs, variables, durations, sizes.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, RangedU64ValueParser, TypedValueParser};
use domain::ArtifactId;
use domain::workload::Image;
use rpc::spec::{LEAST_MEMORY_BYTES, MOST_MEMORY_BYTES};
pub(crate) use server::settings::{cpu, duration, size};

use crate::render::table;

/// `-i`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InputArg {
    pub(crate) name: String,
    pub(crate) source: Source,
    pub(crate) read_only: bool,
}

/// Where an input comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    Directory(PathBuf),
    Artifact(ArtifactId),
}

/// `-o`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutputArg {
    pub(crate) name: String,
    /// Where it is brought to. `None`: it stays in the cluster.
    pub(crate) directory: Option<PathBuf>,
}

/// `--cache`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CacheArg {
    pub(crate) name: String,
    /// Where it appears, absolute.
    pub(crate) path: OsString,
}

/// `--env`
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EnvironmentArg {
    pub(crate) name: OsString,
    /// `None`: copied from our environment.
    pub(crate) value: Option<OsString>,
}

pub(crate) fn input_parser() -> impl TypedValueParser<Value = InputArg> {
    OsStringValueParser::new().try_map(|text| input(&text))
}

pub(crate) fn output_parser() -> impl TypedValueParser<Value = OutputArg> {
    OsStringValueParser::new().try_map(|text| output(&text))
}

pub(crate) fn cache_parser() -> impl TypedValueParser<Value = CacheArg> {
    OsStringValueParser::new().try_map(|text| cache(&text))
}

pub(crate) fn environment_parser() -> impl TypedValueParser<Value = EnvironmentArg> {
    OsStringValueParser::new().try_map(|text| environment(&text))
}

/// A duration in which something can happen.
pub(crate) fn some_time(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("must be more than nothing".to_owned()),
        time => Ok(time),
    }
}

/// A tag: some text.
pub(crate) fn tag(text: &str) -> Result<String, String> {
    if text.trim().is_empty() { Err("a tag is some text".to_owned()) } else { Ok(text.to_owned()) }
}

/// How many of something are wanted.
pub(crate) fn at_least_one() -> impl TypedValueParser<Value = usize> {
    RangedU64ValueParser::<usize>::new().range(1..)
}

/// Parses `NAME=DIR`, `NAME=artifact:UUID`, both with `:ro` behind them.
fn input(text: &OsStr) -> Result<InputArg, String> {
    let Some((name, rest)) = split(text) else {
        return Err("write NAME=DIR, such as src=. (NAME is what the command sees)".to_owned());
    };
    let name = check_name(name)?;
    let (rest, read_only) = match rest.strip_suffix(b":ro") {
        Some(rest) => (rest, true),
        None => (rest, false),
    };
    let source = match rest.strip_prefix(b"artifact:") {
        Some(id) => {
            let id = String::from_utf8_lossy(id);
            Source::Artifact(id.parse().map_err(|_| {
                format!(
                    "{id:?} is not the id of an artifact (a directory of that name is written ./artifact:…)"
                )
            })?)
        }
        None if rest.is_empty() => return Err(format!("{name}= names no directory")),
        None => Source::Directory(path(rest)),
    };
    Ok(InputArg { name, source, read_only })
}

/// Parses `host`, `artifact:UUID` or `resource-type:NAME`.
pub(crate) fn image(text: &str) -> Result<Image, String> {
    match text.strip_prefix("resource-type:") {
        Some("") => return Err("resource-type: names no resource type".to_owned()),
        Some(name) => return Ok(Image::ResourceType(name.to_owned())),
        None => {}
    }
    match text.strip_prefix("artifact:") {
        None if text == "host" => Ok(Image::Host),
        None => Err("write `host`, artifact:UUID (what `gantry upload DIR` printed, of a directory with rootfs/ in it) or \
                     resource-type:NAME"
            .to_owned()),
        Some(id) => {
            id.parse().map(Image::Artifact).map_err(|_| format!("{id:?} is not the id of an artifact"))
        }
    }
}

/// Parses `NAME` or `NAME=DIR`.
fn output(text: &OsStr) -> Result<OutputArg, String> {
    match split(text) {
        None => Ok(OutputArg { name: check_name(text.as_bytes())?, directory: None }),
        Some((name, b"")) => Err(format!("{}= names no directory", String::from_utf8_lossy(name))),
        Some((name, directory)) => {
            Ok(OutputArg { name: check_name(name)?, directory: Some(path(directory)) })
        }
    }
}

/// Parses `NAME=PATH`.
fn cache(text: &OsStr) -> Result<CacheArg, String> {
    let Some((name, path)) = split(text) else {
        return Err("write NAME=PATH, such as cargo=/root/.cargo".to_owned());
    };
    if !path.starts_with(b"/") {
        let path = String::from_utf8_lossy(path);
        return Err(format!("{path:?} is not absolute: it is a path that the command sees"));
    }
    Ok(CacheArg { name: check_name(name)?, path: OsString::from_vec(path.to_vec()) })
}

/// Parses `K=V` or `K`.
fn environment(text: &OsStr) -> Result<EnvironmentArg, String> {
    let os = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
    let (name, value) = match split(text) {
        Some((name, value)) => (name, Some(os(value))),
        None => (text.as_bytes(), None),
    };
    if name.is_empty() {
        return Err("write K=V to set a variable, or K to copy one of yours".to_owned());
    }
    Ok(EnvironmentArg { name: os(name), value })
}

fn check_name(name: &[u8]) -> Result<String, String> {
    let Ok(name) = String::from_utf8(name.to_vec()) else {
        return Err("the name is not UTF-8; the directory may be, the name must".to_owned());
    };
    if name.is_empty() || name.len() > 255 || name.contains('/') || name == "." || name == ".." {
        return Err(format!(
            "{name:?} cannot be a name: write 1 to 255 bytes without a slash, and not . or .."
        ));
    }
    Ok(name)
}

fn split(text: &OsStr) -> Option<(&[u8], &[u8])> {
    let bytes = text.as_bytes();
    let at = bytes.iter().position(|&byte| byte == b'=')?;
    Some((&bytes[..at], &bytes[at + 1..]))
}

fn path(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes.to_vec()))
}

/// The id of something, whatever it is.
pub(crate) fn any_id(text: &str) -> Result<String, String> {
    // All ids are alike.
    text.parse::<domain::ArtifactId>().map(|id| id.to_string()).map_err(|error| error.to_string())
}

/// Parses how long something lives that is renewed: from a second to a day.
pub(crate) fn term(text: &str) -> Result<Duration, String> {
    let term = duration(text)?;
    if !(Duration::from_secs(1)..=Duration::from_secs(24 * 60 * 60)).contains(&term) {
        return Err(format!("{text:?} must be from 1s to 24h"));
    }
    Ok(term)
}

/// Parses the memory of a container, as [`size`] does.
pub(crate) fn memory(text: &str) -> Result<u64, String> {
    let bytes = size(text)?;
    if bytes < LEAST_MEMORY_BYTES {
        return Err(format!(
            "a container needs {} to start, and the command some more",
            table::bytes(LEAST_MEMORY_BYTES)
        ));
    }
    if bytes > MOST_MEMORY_BYTES {
        return Err("no worker has as much".to_owned());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0197c1a2-0000-7000-8000-000000000000";

    #[test]
    fn inputs_are_directories_or_artifacts() {
        let parse = |text: &str| input(OsStr::new(text));
        let directory = |path: &str| Source::Directory(PathBuf::from(path));
        let is = |name: &str, source, read_only| Ok(InputArg { name: name.to_owned(), source, read_only });
        assert_eq!(parse("src=."), is("src", directory("."), false));
        assert_eq!(parse("src=/a=b:ro"), is("src", directory("/a=b"), true));
        assert_eq!(parse("src=./x:ro/"), is("src", directory("./x:ro/"), false));
        let artifact = Source::Artifact(ID.parse().expect("an id"));
        assert_eq!(parse(&format!("a=artifact:{ID}")), is("a", artifact.clone(), false));
        assert_eq!(parse(&format!("a=artifact:{ID}:ro")), is("a", artifact, true));
        for wrong in ["src", "=.", "src=", "src=:ro", "a/b=.", "..=.", "a=artifact:7"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        let odd = input(OsStr::from_bytes(b"src=\xff\n")).expect("any directory");
        assert_eq!(odd.source, Source::Directory(PathBuf::from(OsStr::from_bytes(b"\xff\n"))));
        assert!(input(OsStr::from_bytes(b"\xff=.")).is_err());
    }

    #[test]
    fn caches_have_a_name_and_an_absolute_path() {
        let parse = |text: &str| cache(OsStr::new(text));
        let there = CacheArg { name: "cargo".to_owned(), path: OsString::from("/root/.cargo=x") };
        assert_eq!(parse("cargo=/root/.cargo=x"), Ok(there));
        for wrong in ["", "cargo", "=/x", "cargo=", "cargo=target", "a/b=/x", ".=/x"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn outputs_may_stay_in_the_cluster() {
        let parse = |text: &str| output(OsStr::new(text));
        assert_eq!(parse("out"), Ok(OutputArg { name: "out".to_owned(), directory: None }));
        let there = OutputArg { name: "out".to_owned(), directory: Some(PathBuf::from("./a=b")) };
        assert_eq!(parse("out=./a=b"), Ok(there));
        for wrong in ["", "=x", "out=", "a/b", "."] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn variables_are_set_or_copied() {
        let parse = |text: &str| environment(OsStr::new(text));
        let is = |name: &str, value: Option<&str>| {
            Ok(EnvironmentArg { name: name.into(), value: value.map(Into::into) })
        };
        assert_eq!(parse("A=b=c"), is("A", Some("b=c")));
        assert_eq!(parse("A="), is("A", Some("")));
        assert_eq!(parse("A"), is("A", None));
        assert!(parse("").is_err());
        assert!(parse("=x").is_err());
    }

    #[test]
    fn durations() {
        assert_eq!(duration("90"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("0"), Ok(Duration::ZERO));
        assert_eq!(duration("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(duration("2d"), Ok(Duration::from_secs(172_800)));
        assert_eq!(duration("1s500ms"), Ok(Duration::from_millis(1500)));
        for wrong in ["", "s", "1x", "1h30x", "-1s", "1.5h", "99999999999999999999s", "18446744073709551615d"]
        {
            assert!(duration(wrong).is_err(), "{wrong}");
            assert!(term(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn memory_is_enough_for_a_container() {
        assert_eq!(memory("6M"), Ok(6 << 20));
        for wrong in ["1K", "5M", "2097152T"] {
            assert!(memory(wrong).is_err(), "{wrong}");
        }
        assert!(memory("1K").expect_err("refused").contains("6.0 MiB"));
    }
}
