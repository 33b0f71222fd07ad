//! Parsers for values of options: inputs, outputs, caches, variables, durations and sizes.

mod service;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::builder::{OsStringValueParser, RangedU64ValueParser, TypedValueParser};
use domain::ArtifactId;
use domain::workload::Image;
use prost_types::Timestamp;
use rpc::spec::{MAX_DISK_BYTES, MAX_MEMORY_BYTES, MIN_DISK_BYTES, MIN_MEMORY_BYTES, name};
pub(crate) use server::settings::{cpu, duration, size, size_or_zero};

use crate::render::listing::Format;
use crate::render::table;
use crate::render::template::Template;
pub(crate) use service::{ServiceArg, ServiceCheck, service};

/// Value of `--input`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InputArg {
    pub(crate) name: String,
    pub(crate) source: Source,
    pub(crate) read_only: bool,
}

/// Source of an input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    Directory(PathBuf),
    Artifact(ArtifactId),
}

/// Value of `--output`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutputArg {
    pub(crate) name: String,
    /// Directory that the output is downloaded into. `None`: the output stays in the cluster.
    pub(crate) directory: Option<PathBuf>,
}

/// Value of `--cache`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CacheArg {
    pub(crate) name: String,
    /// Absolute path in the container.
    pub(crate) path: OsString,
}

/// Value of `--env`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EnvironmentArg {
    pub(crate) name: OsString,
    /// `None`: the value is copied from the environment of `gantry`.
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

/// Parses a duration that is longer than 0.
pub(crate) fn positive_duration(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("the duration must be longer than 0".to_owned()),
        time => Ok(time),
    }
}

/// Parses a tag, which must not be blank.
pub(crate) fn tag(text: &str) -> Result<String, String> {
    if text.trim().is_empty() { Err("a tag must not be empty".to_owned()) } else { Ok(text.to_owned()) }
}

/// Parser for a number of at least 1.
pub(crate) fn at_least_one() -> impl TypedValueParser<Value = usize> {
    RangedU64ValueParser::<usize>::new().range(1..)
}

/// Parses `NAME=DIR` or `NAME=artifact:UUID`, each with an optional `:ro` at the end.
fn input(text: &OsStr) -> Result<InputArg, String> {
    let Some((name, rest)) = split(text) else {
        let form = "write NAME=DIR, such as src=. (the command sees DIR as ./NAME)";
        return Err(match text.to_str().map(|text| text.trim_end_matches('/')) {
            Some(name) if check_name(name.as_bytes()).is_ok() && Path::new(name).is_dir() => {
                format!("write {name}={name} for the directory {name}; in general, {form}")
            }
            _ => form.to_owned(),
        });
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
                    "{id:?} is not the id of an artifact; for a directory of that name, write ./artifact:…"
                )
            })?)
        }
        None if rest.is_empty() => return Err(format!("the directory is missing after {name}=")),
        None => Source::Directory(path(rest)),
    };
    Ok(InputArg { name, source, read_only })
}

/// Value of `--image`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ImageArg {
    /// An image that workers or the cluster have.
    Known(Image),
    /// A reference of an image in a registry.
    Registry(String),
    /// An image in a file or directory of this machine.
    File(ImageFile),
}

/// An image in a file or directory of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ImageFile {
    pub(crate) format: ImageFormat,
    pub(crate) path: PathBuf,
    /// Name of the image within the file.
    pub(crate) name: Option<String>,
}

/// Format of an image on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ImageFormat {
    /// A directory with an OCI layout.
    Oci,
    /// A tar archive of an OCI layout.
    OciArchive,
    /// An archive of `docker save`.
    DockerArchive,
}

/// Parses a platform, such as `linux/amd64`.
pub(crate) fn platform(text: &str) -> Result<images::Platform, String> {
    text.parse()
}

/// Parses `host`, `artifact:UUID`, `resource-type:NAME`, `oci:DIR[:NAME]`, `oci-archive:FILE`,
/// `docker-archive:FILE`, or else a reference of an image in a registry.
pub(crate) fn image(text: &str) -> Result<ImageArg, String> {
    let formats = [
        ("oci:", ImageFormat::Oci),
        ("oci-archive:", ImageFormat::OciArchive),
        ("docker-archive:", ImageFormat::DockerArchive),
    ];
    for (prefix, format) in formats {
        let Some(rest) = text.strip_prefix(prefix) else { continue };
        let (path, name) = rest.split_once(':').map_or((rest, None), |(path, name)| (path, Some(name)));
        if path.is_empty() || name == Some("") {
            return Err(format!("write {prefix}PATH, or {prefix}PATH:NAME"));
        }
        let (path, name) = (path.into(), name.map(str::to_owned));
        return Ok(ImageArg::File(ImageFile { format, path, name }));
    }
    if text == "host" || text.starts_with("artifact:") || text.starts_with("resource-type:") {
        return known_image(text).map(ImageArg::Known);
    }
    match images::parse_reference(text, images::DEFAULT_REGISTRY) {
        Ok(_) => Ok(ImageArg::Registry(text.to_owned())),
        Err(error) => Err(format!("{error}; `gantry help run` lists the other kinds of images")),
    }
}

/// Parses `host`, `artifact:UUID` or `resource-type:NAME`.
fn known_image(text: &str) -> Result<Image, String> {
    match text.strip_prefix("resource-type:") {
        Some("") => return Err("the name is missing after resource-type:".to_owned()),
        Some(name) => return Ok(Image::ResourceType(name.to_owned())),
        None => {}
    }
    match text.strip_prefix("artifact:") {
        None if text == "host" => Ok(Image::Host),
        None => Err("write `host`, artifact:UUID or resource-type:NAME".to_owned()),
        Some(id) => {
            id.parse().map(Image::Artifact).map_err(|_| format!("{id:?} is not the id of an artifact"))
        }
    }
}

/// Parses `NAME` or `NAME=DIR`.
fn output(text: &OsStr) -> Result<OutputArg, String> {
    match split(text) {
        None => Ok(OutputArg { name: check_name(text.as_bytes())?, directory: None }),
        Some((name, b"")) => {
            Err(format!("the directory is missing after {}=", String::from_utf8_lossy(name)))
        }
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
        return Err(format!("{path:?} must be absolute; it is a path in the container"));
    }
    Ok(CacheArg { name: check_name(name)?, path: OsString::from_vec(path.to_vec()) })
}

/// Parses `K=V` or `K`.
pub(crate) fn environment(text: &OsStr) -> Result<EnvironmentArg, String> {
    let os = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
    let (name, value) = match split(text) {
        Some((name, value)) => (name, Some(os(value))),
        None => (text.as_bytes(), None),
    };
    if name.is_empty() {
        return Err("write K=V to set a variable, or K to copy yours".to_owned());
    }
    Ok(EnvironmentArg { name: os(name), value })
}

fn check_name(name: &[u8]) -> Result<String, String> {
    let Ok(name) = String::from_utf8(name.to_vec()) else {
        return Err("the name must be UTF-8; only the directory may have other bytes".to_owned());
    };
    if name.is_empty() || name.len() > 255 || name.contains('/') || name == "." || name == ".." {
        return Err(format!(
            "{name:?} is not a valid name; write 1 to 255 bytes without a slash, other than . and .."
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

/// Parses the id of an object of any kind.
pub(crate) fn any_id(text: &str) -> Result<String, String> {
    // All ids are UUIDs.
    text.parse::<domain::ArtifactId>().map(|id| id.to_string()).map_err(|error| error.to_string())
}

/// Checks the handle of a volume or container, or the beginning of one.
pub(crate) fn handle(text: &str) -> Result<String, String> {
    match name::id_range(text) {
        Some(_) => Ok(text.to_owned()),
        None => Err("write a handle, or its first 4 digits or more".to_owned()),
    }
}

/// Checks a reference to a workload: a name, an id, the beginning of an id, or `last`.
pub(crate) fn workload(text: &str) -> Result<String, String> {
    match name::parse_reference("reference", text) {
        Ok(_) => Ok(text.to_owned()),
        Err(_) => Err(format!(
            "write a name, `{}` for the newest workload, an id, or its first 4 digits or more; `gantry ps -a` lists workloads",
            name::LAST
        )),
    }
}

/// Checks the id of an artifact, the beginning of one, or `WORKLOAD:OUTPUT`.
pub(crate) fn artifact(text: &str) -> Result<String, String> {
    match text.split_once(':') {
        Some((of, output)) if !output.is_empty() => workload(of).map(|_| text.to_owned()),
        None if name::id_range(text).is_some() => Ok(text.to_owned()),
        _ => Err(
            "write an id, its first 4 digits or more, or WORKLOAD:OUTPUT; `gantry list artifacts` lists artifacts"
                .to_owned(),
        ),
    }
}

/// File or output of a workload, as `gantry cp` names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CopySource {
    /// Reference to the artifact: `WORKLOAD:OUTPUT`, or an id.
    pub(crate) artifact: String,
    /// Path of a file in the artifact. `None`: the whole artifact.
    pub(crate) path: Option<PathBuf>,
}

/// Parses `WORKLOAD:OUTPUT`, `WORKLOAD:OUTPUT/PATH` or `ARTIFACT:/PATH`.
fn copy_source(text: &OsStr) -> Result<CopySource, String> {
    let bytes = text.as_bytes();
    let Some(colon) = bytes.iter().position(|byte| *byte == b':') else {
        return Err(
            "write WORKLOAD:OUTPUT or WORKLOAD:OUTPUT/PATH; to send files to a running container, use \
                    `gantry exec -i WORKLOAD -- tar -xf - < FILE`"
                .to_owned(),
        );
    };
    let slash = bytes[colon..].iter().position(|byte| *byte == b'/').map_or(bytes.len(), |at| colon + at);
    let whole = if slash == colon + 1 { &bytes[..colon] } else { &bytes[..slash] };
    let reference = std::str::from_utf8(whole).map_err(|_| "the name of the output must be UTF-8")?;
    let path = bytes.get(slash + 1..).filter(|path| !path.is_empty()).map(self::path);
    let from_container = "write WORKLOAD:OUTPUT/PATH for a file of an output; for a file of a running container, use \
                          `gantry exec WORKLOAD -- cat PATH > FILE`";
    match artifact(reference) {
        Err(_) if slash == colon + 1 => Err(from_container.to_owned()),
        artifact => Ok(CopySource { artifact: artifact?, path }),
    }
}

pub(crate) fn copy_source_parser() -> impl TypedValueParser<Value = CopySource> {
    OsStringValueParser::new().try_map(|text| copy_source(&text))
}

/// Checks the name of a new workload.
pub(crate) fn workload_name(text: &str) -> Result<String, String> {
    name::check_text(text).map(|()| text.to_owned()).map_err(|why| format!("the name {why}"))
}

/// Signal that stops a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopSignal {
    /// SIGTERM, and SIGKILL after a time.
    Terminate,
    /// SIGKILL.
    Kill,
}

/// Parses `KILL` or `TERM`, with or without `SIG`, or the number of the signal.
pub(crate) fn stop_signal(text: &str) -> Result<StopSignal, String> {
    let upper = text.to_ascii_uppercase();
    match upper.strip_prefix("SIG").unwrap_or(&upper) {
        "KILL" | "9" => Ok(StopSignal::Kill),
        "TERM" | "15" => Ok(StopSignal::Terminate),
        _ => Err("write KILL or TERM; for other signals, run `gantry exec WORKLOAD -- kill -s SIGNAL PID`"
            .to_owned()),
    }
}

/// Parses `KEY=VALUE`.
pub(crate) fn filter(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() && !value.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("write KEY=VALUE, such as state=running".to_owned()),
    }
}

/// Parses the value of `--format`.
pub(crate) fn format(text: &str) -> Result<Format, String> {
    match text {
        "table" => Ok(Format::Table),
        "wide" => Ok(Format::Wide),
        "json" => Ok(Format::Json),
        text if text.contains("{{") || text.contains("{%") => Template::parse(text).map(Format::Template),
        _ => Err("write table, wide, json, or a template with fields such as {{workload_id}}".to_owned()),
    }
}

/// Parses a time: how long ago, or an instant.
pub(crate) fn time(text: &str) -> Result<SystemTime, String> {
    if let Ok(ago) = duration(text) {
        return SystemTime::now().checked_sub(ago).ok_or_else(|| "is too long ago".to_owned());
    }
    let at = text.parse::<Timestamp>().ok().and_then(|at| at.try_into().ok());
    at.ok_or_else(|| {
        "write how long ago, such as 90s or 1h30m, or a time such as 2026-01-31T12:00:00Z".to_owned()
    })
}

/// Rejects `--volume`, and says what to write instead.
pub(crate) fn no_volume(text: &str) -> Result<String, String> {
    let (host, container) = text.split_once(':').unwrap_or((text, ""));
    let name = container.trim_end_matches(":ro").rsplit('/').find(|part| !part.is_empty()).unwrap_or("src");
    Err(format!(
        "workers do not mount directories of this machine; upload it with `-i {name}={host}`, which the command finds as ./{name}; \
         `-o {name}={host}` writes its changes back"
    ))
}

/// Parses a term from one second to one day.
pub(crate) fn term(text: &str) -> Result<Duration, String> {
    let term = duration(text)?;
    if !(Duration::from_secs(1)..=Duration::from_secs(24 * 60 * 60)).contains(&term) {
        return Err(format!("{text:?} must be from 1s to 24h"));
    }
    Ok(term)
}

/// Parses the memory limit of a container, in bytes, with the syntax of [`size`].
pub(crate) fn memory(text: &str) -> Result<u64, String> {
    let bytes = size_or_zero(text)?;
    if bytes < MIN_MEMORY_BYTES {
        return Err(format!(
            "the limit is too small: a container needs {} to start, and the command needs more",
            table::bytes(MIN_MEMORY_BYTES)
        ));
    }
    if bytes > MAX_MEMORY_BYTES {
        return Err("no worker has that much memory".to_owned());
    }
    Ok(bytes)
}

/// Parses the disk limit of a container, in bytes, with the syntax of [`size`].
pub(crate) fn disk(text: &str) -> Result<u64, String> {
    let bytes = size_or_zero(text)?;
    if bytes < MIN_DISK_BYTES {
        return Err(format!("the limit is too small: at least {}", table::bytes(MIN_DISK_BYTES)));
    }
    if bytes > MAX_DISK_BYTES {
        return Err("no worker has that much disk space".to_owned());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0197c1a2-0000-7000-8000-000000000000";

    #[test]
    fn directory_without_name_is_suggested() {
        let error = |text: &str| input(OsStr::new(text)).expect_err("malformed");
        // The tests run in the directory of the package.
        assert!(error("src").starts_with("write src=src for the directory src"), "{}", error("src"));
        assert!(error("src/").starts_with("write src=src for"), "{}", error("src/"));
        for general in ["none", "../gantry", "."] {
            assert!(error(general).starts_with("write NAME=DIR"), "{}", error(general));
        }
    }

    #[test]
    fn small_limits_have_the_same_message() {
        for text in ["0", "4"] {
            assert_eq!(disk(text).expect_err("too small"), "the limit is too small: at least 1.0 MiB");
            assert!(memory(text).expect_err("too small").starts_with("the limit is too small"));
        }
    }

    #[test]
    fn input_is_directory_or_artifact() {
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
    fn cache_has_name_and_absolute_path() {
        let parse = |text: &str| cache(OsStr::new(text));
        let there = CacheArg { name: "cargo".to_owned(), path: OsString::from("/root/.cargo=x") };
        assert_eq!(parse("cargo=/root/.cargo=x"), Ok(there));
        for wrong in ["", "cargo", "=/x", "cargo=", "cargo=target", "a/b=/x", ".=/x"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn output_without_directory_stays_in_cluster() {
        let parse = |text: &str| output(OsStr::new(text));
        assert_eq!(parse("out"), Ok(OutputArg { name: "out".to_owned(), directory: None }));
        let there = OutputArg { name: "out".to_owned(), directory: Some(PathBuf::from("./a=b")) };
        assert_eq!(parse("out=./a=b"), Ok(there));
        for wrong in ["", "=x", "out=", "a/b", "."] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn variable_is_set_or_copied() {
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
    fn references_and_names_are_checked() {
        for reference in ["build-3", "last", "01a2", ID, &ID.replace('-', "")] {
            assert_eq!(workload(reference).as_deref(), Ok(reference));
        }
        assert_eq!(artifact("01a2").as_deref(), Ok("01a2"));
        assert_eq!(artifact("build-3:report").as_deref(), Ok("build-3:report"));
        for wrong in ["build-3", "build-3:", "a b:report", ":report"] {
            assert!(artifact(wrong).is_err(), "{wrong}");
        }
        assert!(workload("a b").expect_err("refused").contains("gantry ps -a"));
        assert_eq!(workload_name("build-3").as_deref(), Ok("build-3"));
        for wrong in ["last", ID, "a b", ""] {
            assert!(workload_name(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn copy_source_is_output_or_file() {
        let parse = |text: &str| copy_source(OsStr::new(text));
        let is = |artifact: &str, path: Option<&str>| {
            Ok(CopySource { artifact: artifact.to_owned(), path: path.map(PathBuf::from) })
        };
        assert_eq!(parse("build:report"), is("build:report", None));
        assert_eq!(parse("build:report/"), is("build:report", None));
        assert_eq!(parse("build:report/a/b"), is("build:report", Some("a/b")));
        assert_eq!(parse(&format!("{ID}:/a")), is(ID, Some("a")));
        for wrong in ["report", "./report", "build:", ":report", "build:/a"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert!(parse("build:/a").expect_err("refused").contains("gantry exec"));
    }

    #[test]
    fn signals_that_stop_are_parsed() {
        for kill in ["KILL", "SIGKILL", "kill", "9"] {
            assert_eq!(stop_signal(kill), Ok(StopSignal::Kill));
        }
        assert_eq!(stop_signal("sigterm"), Ok(StopSignal::Terminate));
        assert!(stop_signal("HUP").expect_err("refused").contains("gantry exec"));
    }

    #[test]
    fn volume_is_rejected_with_input() {
        for given in ["/home/me/app:/src/app", "/home/me/app:/src/app:ro"] {
            assert!(no_volume(given).expect_err("refused").contains("-i app=/home/me/app"), "{given}");
        }
        assert!(no_volume("data").expect_err("refused").contains("-i src=data"));
    }

    #[test]
    fn durations_are_parsed() {
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
    fn times_are_parsed() {
        let at = |seconds| Ok(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(time("1970-01-02T00:00:00Z"), at(86_400));
        assert_eq!(time("1970-01-02T01:00:00+01:00"), at(86_400));
        let ago = time("10m").expect("a time").elapsed().expect("in the past");
        assert_eq!(ago.as_secs() / 60, 10);
        for wrong in ["", "yesterday", "2026-13-01T00:00:00Z", "-1s"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn memory_limit_has_bounds() {
        assert_eq!(memory("6M"), Ok(6 << 20));
        for wrong in ["1K", "5M", "2097152T"] {
            assert!(memory(wrong).is_err(), "{wrong}");
        }
        assert!(memory("1K").expect_err("refused").contains("6.0 MiB"));
    }

    #[test]
    fn disk_limit_has_bounds() {
        assert_eq!(disk("1M"), Ok(1 << 20));
        for wrong in ["0", "1K", "2097152T"] {
            assert!(disk(wrong).is_err(), "{wrong}");
        }
        assert!(disk("1K").expect_err("refused").contains("1.0 MiB"));
    }
}
