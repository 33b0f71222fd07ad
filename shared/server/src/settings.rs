//! Settings of programs: their variables, their sources, and the syntax of durations, sizes and
//! cores.
//!
//! Every setting is a flag and an environment variable `GANTRY_…`. A service rejects an unknown
//! variable of that form, because the operator meant to set something.

use std::time::Duration;

use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{ArgMatches, Command};
use rpc::spec::MAX_CPU_MILLIS;

/// All variables of all programs. A test of each program compares its settings with this list.
const KNOWN_VARIABLES: &[&str] = &[
    "GANTRY_ABANDONED_AFTER",
    "GANTRY_ARTIFACT_STORE",
    "GANTRY_BAGGAGECLAIM",
    "GANTRY_BAGGAGECLAIM_ENCODING",
    "GANTRY_CLAIM_TERM",
    "GANTRY_COLLECT_INTERVAL",
    "GANTRY_CONTEXT",
    "GANTRY_DATABASE_CONNECTIONS",
    "GANTRY_DATABASE_SCHEMA",
    "GANTRY_DATABASE_URL",
    "GANTRY_DEFAULT_KEEP",
    "GANTRY_DEFAULT_REGISTRY",
    "GANTRY_DEFAULT_TERM",
    "GANTRY_DESTROY_CONCURRENCY",
    "GANTRY_DRAIN_DELAY",
    "GANTRY_DRAIN_TIMEOUT",
    "GANTRY_ENDPOINT",
    "GANTRY_GARDEN",
    "GANTRY_GATEWAY_PROXY",
    "GANTRY_GC_GRACE",
    "GANTRY_HEARTBEAT",
    "GANTRY_HOLD_DESTRUCTION",
    "GANTRY_IDLE_END",
    "GANTRY_IMAGE_CACHE",
    "GANTRY_IMAGE_CACHE_BYTES",
    "GANTRY_INSECURE",
    "GANTRY_KEEP_FINISHED",
    "GANTRY_LEASE_TERM",
    "GANTRY_LISTEN",
    "GANTRY_LOG",
    "GANTRY_LOST_AFTER",
    "GANTRY_LOST_GRACE",
    "GANTRY_MAX_CONTAINERS_PER_WORKER",
    "GANTRY_MAX_TASKS_PER_WORKER",
    "GANTRY_MAX_VOLUMES_PER_WORKER",
    "GANTRY_MAX_WAITING_BYTES_PER_TEAM",
    "GANTRY_MAX_WAITING_PER_TEAM",
    "GANTRY_METRICS_LISTEN",
    "GANTRY_NO_MIGRATE",
    "GANTRY_PATIENCE",
    "GANTRY_PEER_TO_PEER",
    "GANTRY_PLACEMENT_STRATEGY",
    "GANTRY_PLACEMENT_STRATEGY_CHECKS",
    "GANTRY_PLACEMENT_STRATEGY_WITHOUT_INPUTS",
    "GANTRY_POLL_INTERVAL",
    "GANTRY_PROBE_INTERVAL",
    "GANTRY_PROXY",
    "GANTRY_QUARANTINE_AFTER",
    "GANTRY_QUARANTINE_FOR",
    "GANTRY_QUARANTINE_FOR_AT_MOST",
    "GANTRY_QUEUE_AGING",
    "GANTRY_RECONCILE_GRACE",
    "GANTRY_RECONCILE_INTERVAL",
    "GANTRY_REGISTRY_CA",
    "GANTRY_REGISTRY_CREDENTIALS",
    "GANTRY_REGISTRY_MIRROR",
    "GANTRY_REGISTRY_PLAIN_HTTP",
    "GANTRY_REMEMBER",
    "GANTRY_REMEMBER_LOST",
    "GANTRY_REPORT_INTERVAL",
    "GANTRY_RESOURCE_CACHE_TTL",
    "GANTRY_RUNTIME_DIR",
    "GANTRY_SCHEDULER",
    "GANTRY_SCRUB_RATE",
    "GANTRY_SERVER",
    "GANTRY_STATE_DIR",
    "GANTRY_STOP_AFTER",
    "GANTRY_STREAMER",
    "GANTRY_SWEEP_INTERVAL",
    "GANTRY_TASK_CACHE_TTL",
    "GANTRY_TEAM",
    "GANTRY_TEAMS_KEEP_TO_THEIR_OWN",
    "GANTRY_TEAM_WEIGHTS",
    "GANTRY_TICKET_VALIDITY",
    "GANTRY_TIMEOUT_GRACE",
    "GANTRY_TOKEN_FILE",
    "GANTRY_TOMBSTONE",
    "GANTRY_UNOWNED_TTL",
    "GANTRY_WORKERS_FILE",
    "GANTRY_WORKER_ALLOW",
    "GANTRY_WORKER_CONTAINER_MEMORY",
    "GANTRY_WORKER_CONTAINER_PIDS",
    "GANTRY_WORKER_CPU",
    "GANTRY_WORKER_EPHEMERAL",
    "GANTRY_WORKER_HOST_PATHS",
    "GANTRY_WORKER_MAX_CONTAINERS",
    "GANTRY_WORKER_MAX_TASKS",
    "GANTRY_WORKER_MAX_VOLUMES",
    "GANTRY_WORKER_LOW_DISK",
    "GANTRY_WORKER_MEMORY",
    "GANTRY_WORKER_MIN_FREE_DISK",
    "GANTRY_WORKER_NAME",
    "GANTRY_WORKER_NETWORK_POOL",
    "GANTRY_WORKER_PLATFORM",
    "GANTRY_WORKER_TAGS",
    "GANTRY_WORKER_ZONE",
    "GANTRY_WORKER_TEAM",
    "GANTRY_WORKER_TTL",
];

/// Renamed flags and variables: the old name and the new name.
const RENAMED: &[(&str, &str)] = &[
    ("--door", "--proxy"),
    ("GANTRY_DOOR", "GANTRY_PROXY"),
    ("GANTRY_GATEWAY_DOOR", "GANTRY_GATEWAY_PROXY"),
    ("--set-aside-after", "--quarantine-after"),
    ("--set-aside-for", "--quarantine-for"),
    ("--set-aside-for-at-most", "--quarantine-for-at-most"),
    ("GANTRY_SET_ASIDE_AFTER", "GANTRY_QUARANTINE_AFTER"),
    ("GANTRY_SET_ASIDE_FOR", "GANTRY_QUARANTINE_FOR"),
    ("GANTRY_SET_ASIDE_FOR_AT_MOST", "GANTRY_QUARANTINE_FOR_AT_MOST"),
];

/// A flag or variable was renamed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{old} was renamed: use {new}")]
pub struct Renamed {
    old: &'static str,
    new: &'static str,
}

fn renamed(name: &str) -> Option<Renamed> {
    RENAMED.iter().find(|(old, _)| *old == name).map(|(old, new)| Renamed { old, new })
}

/// Returns the new name of the flag that caused an error of clap, if the flag was renamed.
#[must_use]
pub fn renamed_flag(error: &clap::Error) -> Option<Renamed> {
    match error.get(ContextKind::InvalidArg)? {
        ContextValue::String(flag) => renamed(flag.split('=').next()?),
        _ => None,
    }
}

/// Returns the first variable of the environment that was renamed.
pub fn renamed_variable(variables: impl IntoIterator<Item = (String, String)>) -> Option<Renamed> {
    variables.into_iter().find_map(|(name, _)| renamed(&name))
}

/// Returns the variables of `command` that are missing in the list of all variables, so that other
/// programs would reject them. Tests check that there are none.
#[must_use]
pub fn unlisted_variables(command: &Command) -> Vec<String> {
    variables_of(command).into_iter().filter(|name| !KNOWN_VARIABLES.contains(&name.as_str())).collect()
}

fn variables_of(command: &Command) -> Vec<String> {
    let variables = command.get_arguments().filter_map(clap::Arg::get_env);
    variables.map(|name| name.to_string_lossy().into_owned()).collect()
}

/// A variable of the environment has the form of a setting but is unknown.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UnknownVariable {
    #[error(transparent)]
    Renamed(#[from] Renamed),
    #[error("{name} is not a setting of Gantry{}", hint.as_deref().map(|hint| format!("; did you mean {hint}?")).unwrap_or_default())]
    Unknown { name: String, hint: Option<String> },
}

/// Checks that each variable with the form of a setting is a known setting.
pub(crate) fn check_environment(
    command: &Command,
    variables: impl IntoIterator<Item = (String, String)>,
) -> Result<(), UnknownVariable> {
    let own = variables_of(command);
    let known: Vec<&str> = KNOWN_VARIABLES.iter().copied().chain(own.iter().map(String::as_str)).collect();
    for (name, value) in variables {
        if !name.starts_with("GANTRY_")
            || known.contains(&name.as_str())
            || is_orchestrator_variable(&name, &value)
        {
            continue;
        }
        if let Some(renamed) = renamed(&name) {
            return Err(renamed.into());
        }
        let hint = closest(&name, &known, 3);
        return Err(UnknownVariable::Unknown { name, hint });
    }
    Ok(())
}

/// Returns a warning for each unknown variable whose name is close to that of a setting.
/// Interactive programs use this, because the environment of a user may contain unrelated
/// variables.
#[must_use]
pub fn misspelled_variables(variables: impl IntoIterator<Item = (String, String)>) -> Vec<String> {
    let is_unknown = |name: &String| {
        name.starts_with("GANTRY_") && !KNOWN_VARIABLES.contains(&name.as_str()) && renamed(name).is_none()
    };
    let names = variables.into_iter().map(|(name, _)| name).filter(is_unknown);
    let warnings = names.filter_map(|name| {
        let hint = Some(closest(&name, KNOWN_VARIABLES, 2)?);
        Some(UnknownVariable::Unknown { name, hint }.to_string())
    });
    warnings.collect()
}

/// Whether Kubernetes has set a variable. For a service `gantry-scheduler` it sets variables such
/// as `GANTRY_SCHEDULER_SERVICE_HOST` and `GANTRY_SCHEDULER_PORT_7401_TCP_ADDR` in every container.
fn is_orchestrator_variable(name: &str, value: &str) -> bool {
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.contains("_PORT_")
        || (name.ends_with("_PORT") && value.contains("://"))
}

/// Returns the name in `known` that is closest to `name`, if their distance is at most
/// `max_distance`.
fn closest(name: &str, known: &[&str], max_distance: usize) -> Option<String> {
    let nearest = known.iter().map(|known| (distance(name, known), *known)).min();
    nearest.filter(|(distance, _)| *distance <= max_distance).map(|(_, known)| known.to_owned())
}

/// Returns the edit distance (Levenshtein) of two names.
fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.chars().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, b) in right.iter().enumerate() {
            let changed = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[right.len()]
}

/// Returns a table of all settings with their values and sources. Secrets are hidden.
pub(crate) fn table(command: &Command, matches: &ArgMatches) -> String {
    let mut rows = Vec::new();
    for argument in command.get_arguments() {
        let id = argument.get_id().as_str();
        if matches!(id, "help" | "version" | "print_config") {
            continue;
        }
        let source = match matches.value_source(id) {
            Some(ValueSource::CommandLine) => "flag",
            Some(ValueSource::EnvVariable) => "environment",
            _ => "default",
        };
        let values = matches.get_raw(id).into_iter().flatten();
        let value = values.map(|value| value.to_string_lossy()).collect::<Vec<_>>().join(",");
        let value = match value.as_str() {
            "" => "-".to_owned(),
            secret if argument.is_hide_env_values_set() => hide(secret),
            value => value.to_owned(),
        };
        let variable = argument.get_env().map_or("-".into(), std::ffi::OsStr::to_string_lossy);
        let flag = argument.get_long().map_or_else(String::new, |long| format!("--{long}"));
        rows.push([flag, variable.into_owned(), source.to_owned(), value]);
    }
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let (flags, variables, sources) = (width(0), width(1), width(2));
    let line = |[flag, variable, source, value]: &[String; 4]| {
        format!("{flag:flags$}  {variable:variables$}  {source:sources$}  {value}\n")
    };
    rows.iter().map(line).collect()
}

/// Hides the passwords in a URL. A text that is not a URL is hidden as a whole.
fn hide(secret: &str) -> String {
    let Some((scheme, rest)) = secret.split_once("://") else { return "(hidden)".to_owned() };
    let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
    let rest = match rest.rsplit_once('@') {
        Some((login, host)) => {
            let user = login.split(':').next().unwrap_or_default();
            if login.contains(':') { format!("{user}:(hidden)@{host}") } else { format!("{user}@{host}") }
        }
        None => rest.to_owned(),
    };
    let query = query.map(|query| {
        let shown = query.split('&').map(|pair| match pair.split_once('=') {
            Some((name, _)) if name.contains("password") => format!("{name}=(hidden)"),
            _ => pair.to_owned(),
        });
        format!("?{}", shown.collect::<Vec<_>>().join("&"))
    });
    format!("{scheme}://{rest}{}", query.unwrap_or_default())
}

/// Parses a duration of at most 100 years, for example `90s`, `10m`, `1h30m`, `2d` or `500ms`. A
/// plain number is seconds.
pub fn duration(text: &str) -> Result<Duration, String> {
    let malformed = || format!("{text:?} is not a duration: use for example 90s, 10m, 1h30m, 2d or 500ms");
    if let Ok(seconds) = text.parse() {
        return in_bounds(text, Duration::from_secs(seconds));
    }
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(malformed)?;
        let (number, unit_on) = rest.split_at(digits);
        let number: u64 = number.parse().map_err(|_| malformed())?;
        let end = unit_on.find(|c: char| c.is_ascii_digit()).unwrap_or(unit_on.len());
        let (unit, after) = unit_on.split_at(end);
        let seconds = match unit {
            "ms" => None,
            "s" => Some(1),
            "m" => Some(60),
            "h" => Some(60 * 60),
            "d" => Some(24 * 60 * 60),
            _ => return Err(malformed()),
        };
        let part = match seconds {
            None => Duration::from_millis(number),
            Some(seconds) => Duration::from_secs(number.checked_mul(seconds).ok_or_else(malformed)?),
        };
        total = total.checked_add(part).ok_or_else(malformed)?;
        rest = after;
    }
    if text.is_empty() { Err(malformed()) } else { in_bounds(text, total) }
}

/// Checks that a duration is at most 100 years.
fn in_bounds(text: &str, duration: Duration) -> Result<Duration, String> {
    /// 100 years.
    const MAX_DURATION: Duration = Duration::from_hours(36_500 * 24);
    if duration > MAX_DURATION {
        return Err(format!("{text:?} is longer than 100 years (36500d)"));
    }
    Ok(duration)
}

/// Parses a duration of more than zero.
pub fn term(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("the duration must be longer than 0".to_owned()),
        duration => Ok(duration),
    }
}

/// Parses a size in bytes of more than zero, as [`size_or_zero`] does.
pub fn size(text: &str) -> Result<u64, String> {
    match size_or_zero(text)? {
        0 => Err("the size must be larger than 0".to_owned()),
        bytes => Ok(bytes),
    }
}

/// Parses a size in bytes, for example `1048576`, `512M`, `512MiB` or `1.5G`. `M` is 1024², `MB` is
/// 1000².
pub fn size_or_zero(text: &str) -> Result<u64, String> {
    let malformed = || format!("{text:?} is not a size: use for example 512M, 2G or 1.5GiB");
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.to_ascii_lowercase();
    let (letter, base) = match unit.as_str() {
        "" | "b" => ("", 1024),
        unit if unit.ends_with("ib") => (&unit[..unit.len() - 2], 1024),
        unit if unit.ends_with('b') => (&unit[..unit.len() - 1], 1000),
        unit => (unit, 1024_u64),
    };
    let power = match letter {
        "" => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return Err(malformed()),
    };
    scaled(number, base.pow(power)).ok_or_else(malformed)
}

/// Parses processor time in cores into thousandths of a core: `2`, `0.5`, `500m`.
pub fn cpu(text: &str) -> Result<u64, String> {
    let malformed =
        || format!("{text:?} is not a number of cores: use for example 2, 0.5 or 500m; the minimum is 1m");
    let millis = match text.strip_suffix('m') {
        Some(millis) => millis.parse().ok(),
        None => scaled(text, 1000),
    };
    let millis = millis.filter(|&millis| millis > 0).ok_or_else(malformed)?;
    if millis > MAX_CPU_MILLIS {
        return Err(format!("{text:?} is more than the maximum of {} cores", MAX_CPU_MILLIS / 1000));
    }
    Ok(millis)
}

/// Multiplies a decimal number with `factor`, and rounds down.
fn scaled(number: &str, factor: u64) -> Option<u64> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.len() > 9 || fraction.contains('.') {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let fraction_value: u64 = if fraction.is_empty() { 0 } else { fraction.parse().ok()? };
    let parts =
        u128::from(fraction_value) * u128::from(factor) / 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    whole.checked_mul(factor)?.checked_add(u64::try_from(parts).ok()?)
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    #[derive(Parser)]
    struct Program {
        /// URL of the database.
        #[arg(long = "database-url", env = "GANTRY_DATABASE_URL", hide_env_values = true)]
        _database_url: Option<String>,
        /// Interval.
        #[arg(long = "interval", env = "GANTRY_INTERVAL", default_value = "5s", value_parser = duration)]
        _interval: Duration,
    }

    fn checked(name: &str, value: &str) -> Result<(), String> {
        let variables = [("PATH".to_owned(), "/bin".to_owned()), (name.to_owned(), value.to_owned())];
        check_environment(&Program::command(), variables).map_err(|error| error.to_string())
    }

    #[test]
    fn only_close_names_are_misspelled() {
        let names = ["GANTRY_SERVRE", "GANTRY_SERVER", "GANTRY_UNRELATED_TEST", "SERVRE"];
        let variables = names.map(|name| (name.to_owned(), "http://there".to_owned()));
        assert_eq!(
            misspelled_variables(variables),
            ["GANTRY_SERVRE is not a setting of Gantry; did you mean GANTRY_SERVER?"]
        );
    }

    #[test]
    fn renamed_setting_is_rejected_with_new_name() {
        assert_eq!(checked("GANTRY_DOOR", "1"), Err("GANTRY_DOOR was renamed: use GANTRY_PROXY".to_owned()));
        let refused =
            |arguments: &[&str]| Program::command().try_get_matches_from(arguments).expect_err("refused");
        for arguments in [&["program", "--door"][..], &["program", "--door=http://a:1"]] {
            let renamed = renamed_flag(&refused(arguments)).expect("a renamed flag");
            assert_eq!(renamed.to_string(), "--door was renamed: use --proxy");
        }
        assert_eq!(renamed_flag(&refused(&["program", "--dor"])), None);
        for (old, new) in RENAMED {
            assert!(
                !KNOWN_VARIABLES.contains(old) && (old.starts_with("--") || KNOWN_VARIABLES.contains(new)),
                "{old}"
            );
        }
    }

    #[test]
    fn unknown_variable_is_rejected_with_hint() {
        assert_eq!(checked("GANTRY_HEARTBEAT", "1"), Ok(()), "a variable of another program");
        assert_eq!(checked("GANTRY_INTERVAL", "1"), Ok(()));
        assert_eq!(checked("OTHER_SETTING", "1"), Ok(()));
        assert_eq!(
            checked("GANTRY_HEARTBEET", "1"),
            Err("GANTRY_HEARTBEET is not a setting of Gantry; did you mean GANTRY_HEARTBEAT?".to_owned())
        );
        assert_eq!(
            checked("GANTRY_FROBNICATE", "1"),
            Err("GANTRY_FROBNICATE is not a setting of Gantry".to_owned())
        );
    }

    #[test]
    fn variables_of_orchestrator_are_accepted() {
        for name in [
            "GANTRY_SCHEDULER_SERVICE_HOST",
            "GANTRY_STORE_SERVICE_PORT_GRPC",
            "GANTRY_STORE_PORT_1_TCP_ADDR",
        ] {
            assert_eq!(checked(name, "1"), Ok(()), "{name}");
        }
        assert_eq!(checked("GANTRY_STORE_PORT", "tcp://10.0.0.1:7402"), Ok(()));
        assert!(checked("GANTRY_STORE_PORT", "7402").is_err(), "a plain port is not from Kubernetes");
    }

    #[test]
    fn unlisted_variables_are_returned() {
        assert_eq!(unlisted_variables(&Program::command()), ["GANTRY_INTERVAL"]);
    }

    #[test]
    fn table_shows_sources_and_hides_secrets() {
        let url = "postgres://me:secret@host/db?sslmode=require&sslpassword=secret";
        let command = Program::command();
        let matches = command.clone().get_matches_from(["program", "--database-url", url]);
        assert_eq!(
            table(&command, &matches),
            "--database-url  GANTRY_DATABASE_URL  flag     postgres://me:(hidden)@host/db?sslmode=require&sslpassword=(hidden)\n\
             --interval      GANTRY_INTERVAL      default  5s\n"
        );
        assert_eq!(hide("secret"), "(hidden)");
        assert_eq!(hide("sqlite:///path"), "sqlite:///path");
    }

    #[test]
    fn duration_parses_units_and_bounds() {
        assert_eq!(duration("90"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        for malformed in ["", "s", "5x", "-1s", "1.5s", "99999999999999999999s", "36501d", "99999999999"] {
            assert!(duration(malformed).is_err(), "{malformed:?}");
        }
        assert!(duration("36500d").is_ok());
        assert!(term("0s").is_err() && term("1ms").is_ok());
    }

    #[test]
    fn size_and_cpu_parse_units() {
        assert_eq!(size("1048576"), Ok(1 << 20));
        assert_eq!(size("512M"), Ok(512 << 20));
        assert_eq!(size("512MiB"), Ok(512 << 20));
        assert_eq!(size("1.5g"), Ok(3 << 29));
        assert_eq!(size("2KB"), Ok(2000));
        for wrong in ["", "M", "0", "1X", "1.2.3", "-1", ".5G", "99999999999T"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert_eq!(cpu("1m"), Ok(1));
        assert_eq!(cpu("2"), Ok(2000));
        assert_eq!(cpu("0.5"), Ok(500));
        assert_eq!(cpu("250m"), Ok(250));
        for wrong in ["", "0", "x", "-1", "1.x", "0.0001", "1000000"] {
            assert!(cpu(wrong).is_err(), "{wrong}");
        }
    }
}
