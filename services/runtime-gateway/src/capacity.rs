//! Limits and capacity of a worker, from flags of the gateway or from an entry of a workers file.

use std::fmt;

use domain::worker::Capacity;
use rpc::spec::MAX_MEMORY_BYTES;
use runtime::Disk;
use serde::{Deserialize, Deserializer};
use server::settings::{cpu, size};

/// Limits and capacity that an operator sets for one worker. They take precedence over the
/// scheduler's defaults and over what the worker reports.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args, Deserialize)]
#[serde(default)]
pub struct Amounts {
    /// Most workloads at a time. Default: the scheduler's default for all workers, or else no limit
    #[arg(long, env = "GANTRY_WORKER_MAX_TASKS", value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    #[serde(deserialize_with = "limit")]
    pub max_tasks: Option<u32>,
    /// Most containers at a time, including those that are kept after their end. The limit may be
    /// exceeded between two counts. Default: the scheduler's default for all workers, or else no
    /// limit
    #[arg(long, env = "GANTRY_WORKER_MAX_CONTAINERS", value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    #[serde(deserialize_with = "limit")]
    pub max_containers: Option<u32>,
    /// Most volumes at a time. The limit may be exceeded between two counts. Default: the
    /// scheduler's default for all workers, or else no limit
    #[arg(long, env = "GANTRY_WORKER_MAX_VOLUMES", value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    #[serde(deserialize_with = "limit")]
    pub max_volumes: Option<u32>,
    /// Processor time that workloads may reserve in all: `4`, `1.5`, `500m`. Default: all of this
    /// machine, or no limit on a Concourse worker
    #[arg(long = "cpu", env = "GANTRY_WORKER_CPU", value_name = "CORES", value_parser = cpu)]
    #[serde(rename = "cpu", deserialize_with = "cores")]
    pub cpu_millis: Option<u64>,
    /// Memory that workloads may reserve in all: `16G`. Default: all of this machine, or no limit
    /// on a Concourse worker
    #[arg(long = "memory", env = "GANTRY_WORKER_MEMORY", value_name = "SIZE", value_parser = memory)]
    #[serde(rename = "memory", deserialize_with = "bytes")]
    pub memory_bytes: Option<u64>,
    /// Free disk space below which the worker gets no new work: `10G`, `5%`, or 0 for no limit.
    /// Default: 2 % of the disk, at most 2 GiB
    #[arg(long, env = "GANTRY_WORKER_MIN_FREE_DISK", value_name = "SIZE", value_parser = disk_space)]
    #[serde(deserialize_with = "space")]
    pub min_free_disk: Option<DiskSpace>,
    /// Free disk space below which containers of ended workloads, and copies and caches that are
    /// not in use, are deleted: `20G`, `10%`, or 0 for never. At least `--min-free-disk`. Default:
    /// 5 % of the disk, at most 5 GiB
    #[arg(long, env = "GANTRY_WORKER_LOW_DISK", value_name = "SIZE", value_parser = disk_space)]
    #[serde(deserialize_with = "space")]
    pub low_disk: Option<DiskSpace>,
}

/// An amount of disk space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskSpace {
    /// Bytes.
    Bytes(u64),
    /// A percentage of the disk.
    Percent(u8),
}

impl DiskSpace {
    /// Returns the bytes on a disk of this size.
    fn of(self, total_bytes: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => total_bytes / 100 * u64::from(percent),
        }
    }
}

/// Returns the default of `percent` of a disk, at most as many GiB.
fn default_space(percent: u8, total_bytes: u64) -> u64 {
    DiskSpace::Percent(percent).of(total_bytes).min(u64::from(percent) << 30)
}

impl fmt::Display for DiskSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "{bytes} bytes"),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

/// The worker would get no work although copies and caches could be deleted.
#[derive(Debug, thiserror::Error)]
#[error(
    "--low-disk ({low}) must be at least --min-free-disk ({min}), or 0 so that nothing is deleted for space"
)]
pub struct LowDiskError {
    low: DiskSpace,
    min: DiskSpace,
}

impl Amounts {
    /// Checks the amounts against each other. A percentage cannot be compared with bytes before the
    /// disk is known: the larger of both then applies.
    pub fn checked(self) -> Result<Self, LowDiskError> {
        let is_less = match (self.low_disk, self.min_free_disk) {
            (Some(DiskSpace::Bytes(low)), Some(DiskSpace::Bytes(min))) => low > 0 && low < min,
            (Some(DiskSpace::Percent(low)), Some(DiskSpace::Percent(min))) => low > 0 && low < min,
            _ => false,
        };
        match (self.low_disk, self.min_free_disk) {
            (Some(low), Some(min)) if is_less => Err(LowDiskError { low, min }),
            _ => Ok(self),
        }
    }

    /// Limits the workloads of this machine if the process may open few files and no limit is set.
    #[must_use]
    pub fn within_open_files(self) -> Self {
        let most = server::inherited::few_open_files().map(workloads_with);
        if let (None, Some(most)) = (self.max_tasks, most) {
            tracing::warn!(max_tasks = most, "the hard limit of open files is low: further workloads wait");
        }
        Self { max_tasks: self.max_tasks.or(most), ..self }
    }

    /// Returns the capacity that the gateway registers. `has` is what the worker reports.
    pub(crate) fn capacity(&self, has: &runtime::Capabilities, disk: Option<Disk>) -> Capacity {
        Capacity {
            max_tasks: self.max_tasks,
            max_containers: self.max_containers,
            max_volumes: self.max_volumes,
            cpu_millis: self.cpu_millis.or(has.cpu_millis),
            memory_bytes: self.memory_bytes.or(has.memory_bytes),
            disk_bytes: disk.map_or(0, |disk| disk.total_bytes),
            min_free_disk_bytes: disk.map_or(0, |disk| self.min_free_disk_bytes(disk)),
        }
    }

    fn min_free_disk_bytes(&self, Disk { total_bytes, .. }: Disk) -> u64 {
        self.min_free_disk.map_or_else(|| default_space(2, total_bytes), |own| own.of(total_bytes))
    }

    /// Returns the bytes that must be deleted from a disk that has too little free space.
    pub(crate) fn bytes_to_free(&self, disk: Disk) -> u64 {
        let Disk { total_bytes, free_bytes } = disk;
        let low = match self.low_disk.map(|own| own.of(total_bytes)) {
            Some(0) => return 0,
            Some(low) => low,
            None => default_space(5, total_bytes),
        };
        // Otherwise the worker could stay without work although caches could be deleted.
        low.max(self.min_free_disk_bytes(disk)).saturating_sub(free_bytes)
    }
}

/// Returns the number of workloads for which a gateway with this many open files has room.
fn workloads_with(open_files: u64) -> u32 {
    /// Open files of a gateway without workloads, including its databases and some callers.
    const IDLE: u64 = 100;
    /// Most open files of one workload while it starts: its files, its supervisor and its callers.
    const EACH: u64 = 10;
    u32::try_from(open_files.saturating_sub(IDLE) / EACH).unwrap_or(u32::MAX).max(1)
}

fn disk_space(text: &str) -> Result<DiskSpace, String> {
    match text.strip_suffix('%') {
        None if text == "0" => Ok(DiskSpace::Bytes(0)),
        None => size(text).map(DiskSpace::Bytes),
        Some(percent) => match percent.trim().parse() {
            Ok(percent @ 0..=100) => Ok(DiskSpace::Percent(percent)),
            _ => Err("write a percentage from 0% to 100%".to_owned()),
        },
    }
}

fn memory(text: &str) -> Result<u64, String> {
    size(text).and_then(|bytes| {
        if bytes > MAX_MEMORY_BYTES { Err("no worker has that much memory".to_owned()) } else { Ok(bytes) }
    })
}

/// A number, or a text as on the command line.
#[derive(Deserialize)]
#[serde(untagged)]
enum Amount {
    Number(serde_json::Number),
    Text(String),
}

fn amount<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, D::Error> {
    let text = match Option::deserialize(deserializer)? {
        None => return Ok(None),
        Some(Amount::Number(number)) => number.to_string(),
        Some(Amount::Text(text)) => text,
    };
    parse(&text).map(Some).map_err(serde::de::Error::custom)
}

fn limit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    match Option::deserialize(deserializer)? {
        Some(0) => {
            Err(serde::de::Error::custom("must be at least 1; leave it out to use the scheduler's default"))
        }
        limit => Ok(limit),
    }
}

fn cores<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    amount(deserializer, cpu)
}

fn space<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<DiskSpace>, D::Error> {
    amount(deserializer, disk_space)
}

fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    amount(deserializer, memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Amounts, serde_json::Error> {
        serde_json::from_str(text)
    }

    #[test]
    fn amounts_are_parsed_from_a_file() -> Result<(), serde_json::Error> {
        let all = Amounts {
            max_tasks: Some(1),
            max_containers: Some(2),
            max_volumes: Some(3),
            cpu_millis: Some(1500),
            memory_bytes: Some(2 << 30),
            min_free_disk: None,
            low_disk: Some(DiskSpace::Percent(8)),
        };
        for (cpu, memory) in [("\"1.5\"", "\"2G\""), ("\"1500m\"", "2147483648"), ("1.5", "\"2GiB\"")] {
            let text = format!(
                r#"{{"max_tasks":1,"max_containers":2,"max_volumes":3,"cpu":{cpu},"memory":{memory},"low_disk":"8%"}}"#
            );
            assert_eq!(read(&text)?, all, "{text}");
        }
        assert_eq!(read("{}")?, Amounts::default());
        assert_eq!(read(r#"{"max_tasks":null,"cpu":null,"memory":null}"#)?, Amounts::default());
        for wrong in [
            r#"{"cpu":0}"#,
            r#"{"cpu":"x"}"#,
            r#"{"memory":-1}"#,
            r#"{"memory":"2097152T"}"#,
            r#"{"low_disk":"101%"}"#,
            r#"{"min_free_disk":"x"}"#,
            r#"{"max_tasks":-1}"#,
            r#"{"max_tasks":0}"#,
            r#"{"max_containers":0}"#,
            r#"{"max_volumes":0}"#,
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        Ok(())
    }

    #[test]
    fn few_open_files_limit_workloads() {
        assert_eq!([0, 100, 300, 1100].map(workloads_with), [1, 1, 20, 100]);
    }

    #[test]
    fn limit_of_zero_is_rejected() {
        #[derive(Debug, clap::Parser)]
        struct Flags {
            #[command(flatten)]
            _amounts: Amounts,
        }
        for (flag, member) in [
            ("--max-tasks", "max_tasks"),
            ("--max-containers", "max_containers"),
            ("--max-volumes", "max_volumes"),
        ] {
            let parsed = <Flags as clap::Parser>::try_parse_from(["gateway", flag, "0"]);
            assert!(parsed.is_err(), "{parsed:?}");
            let refused = read(&format!(r#"{{"{member}":0}}"#)).expect_err("refused");
            assert!(refused.to_string().contains("must be at least 1"), "{refused}");
        }
    }

    #[test]
    fn operator_settings_override_reported_capacity() {
        let has = runtime::Capabilities {
            image_kinds: Vec::new(),
            features: Vec::new(),
            worker_provided: Vec::new(),
            copy_on_write: String::new(),
            cpu_millis: Some(4000),
            memory_bytes: None,
        };
        let parsed = Amounts { max_volumes: Some(3), ..Amounts::default() }.capacity(&has, None);
        let expected = Capacity { max_volumes: Some(3), cpu_millis: Some(4000), ..Capacity::default() };
        assert_eq!(parsed, expected);
        let amounts = Amounts { cpu_millis: Some(500), memory_bytes: Some(1), ..Amounts::default() };
        let parsed = amounts.capacity(&has, Some(Disk { total_bytes: 7, free_bytes: 5 }));
        let expected =
            Capacity { cpu_millis: Some(500), memory_bytes: Some(1), disk_bytes: 7, ..Capacity::default() };
        assert_eq!(parsed, expected);
    }

    #[test]
    fn disk_limits_have_defaults() {
        let disk =
            |total_gib: u64, free_gib: u64| Disk { total_bytes: total_gib << 30, free_bytes: free_gib << 30 };
        let limits = |amounts: &Amounts, total_gib| {
            let has = runtime::Capabilities::default();
            let min = amounts.capacity(&has, Some(disk(total_gib, 0))).min_free_disk_bytes;
            [min >> 30, amounts.bytes_to_free(disk(total_gib, 1)) >> 30]
        };
        let mut amounts = Amounts::default();
        assert_eq!(limits(&amounts, 1000), [2, 4]);
        assert_eq!(limits(&amounts, 50), [1, 1], "2 % and 5 %");
        amounts.min_free_disk = Some(disk_space("7G").expect("a size"));
        amounts.low_disk = Some(disk_space("10%").expect("a percentage"));
        assert_eq!(limits(&amounts, 100), [7, 9]);
        assert_eq!(limits(&amounts, 20), [7, 6], "no less than the other limit");
        amounts.low_disk = Some(disk_space("0").expect("none"));
        assert_eq!(limits(&amounts, 100), [7, 0]);
    }

    #[test]
    fn low_disk_is_at_least_the_minimum() {
        let checked = |low: Option<&str>, min: Option<&str>| {
            let parse = |text: &str| disk_space(text).expect("a size");
            let amounts =
                Amounts { low_disk: low.map(parse), min_free_disk: min.map(parse), ..Amounts::default() };
            amounts.checked().err().map(|error| error.to_string())
        };
        let error = checked(Some("1%"), Some("2%")).expect("an error");
        assert!(error.starts_with("--low-disk (1%) must be at least --min-free-disk (2%)"), "{error}");
        assert!(checked(Some("1G"), Some("2G")).is_some());
        for (low, min) in [
            (Some("2%"), Some("2%")),
            (Some("0"), Some("2G")),
            (Some("0%"), Some("2%")),
            (Some("1%"), Some("2G")),
            (Some("1%"), None),
            (None, Some("9%")),
        ] {
            assert_eq!(checked(low, min), None, "{low:?} {min:?}");
        }
    }
}
