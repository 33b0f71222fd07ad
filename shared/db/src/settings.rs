//! Settings of a service's database.

use std::path::PathBuf;
use std::time::Duration;

/// Location and use of a database.
#[derive(Debug, Clone)]
pub struct Settings {
    /// URL: `postgres://…` or `sqlite:///path`. A missing SQLite file is created.
    pub url: String,
    /// On PostgreSQL, the schema of all tables. A missing schema is created. `None` means the
    /// default of the server, usually `public`.
    pub schema: Option<String>,
    /// On PostgreSQL, the maximum number of connections of the service, in all pools.
    pub connections: u32,
    /// On PostgreSQL, the number of `connections` that the pool leaves to listeners and to
    /// components with own pools.
    pub reserved: u32,
    /// Whether missing migrations are applied.
    pub migrate: bool,
    /// Whether opening waits while the database is unavailable.
    pub wait: bool,
}

impl<T: Into<String>> From<T> for Settings {
    fn from(url: T) -> Self {
        Self {
            url: url.into(),
            schema: None,
            connections: DEFAULT_CONNECTIONS,
            reserved: 0,
            migrate: true,
            wait: false,
        }
    }
}

impl Settings {
    /// Returns the name of the database for messages, without credentials.
    #[must_use]
    pub fn place(&self) -> String {
        if let Some(file) = self.path() {
            return file;
        }
        let url = self.url.split('?').next().unwrap_or_default();
        let (_, rest) = url.split_once("://").unwrap_or_default();
        let (_, database) = rest.rsplit_once('@').unwrap_or(("", rest));
        let schema = self.schema.as_ref().map_or_else(String::new, |schema| format!("schema {schema} of "));
        format!("{schema}database {database}")
    }
}

impl Settings {
    /// Returns the number of connections of the pool, on PostgreSQL.
    pub(crate) fn pool(&self) -> u32 {
        self.connections.saturating_sub(self.reserved).max(MIN_POOL)
    }

    /// Returns the file of a SQLite database.
    #[must_use]
    pub fn file(&self) -> Option<PathBuf> {
        self.path().map(PathBuf::from)
    }

    fn path(&self) -> Option<String> {
        sqlite_path(&self.url)
    }
}

/// Returns the URL of the SQLite database at `path`.
#[must_use]
pub fn sqlite_url(path: &str) -> String {
    // These characters have a meaning in URLs.
    format!("sqlite://{}", path.replace('%', "%25").replace('?', "%3F"))
}

/// Returns the path in the URL of a SQLite database.
pub(crate) fn sqlite_path(url: &str) -> Option<String> {
    let path = url.split('?').next().unwrap_or_default().strip_prefix("sqlite:")?;
    Some(percent_decode(path.strip_prefix("//").unwrap_or(path)))
}

/// Decodes percent encoding like the driver does. The driver rejects a result that is not UTF-8.
fn percent_decode(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let digits =
            after.get(..2).filter(|digits| *first == b'%' && digits.iter().all(u8::is_ascii_hexdigit));
        let byte = digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Default of the maximum number of connections. Ten replicas of both services with a database use
/// 80 of the 97 connections that PostgreSQL admits by default. The others remain for migrations,
/// probes and operators.
const DEFAULT_CONNECTIONS: u32 = 4;

/// Smallest pool. A migration holds a lock with one connection, and works with another.
const MIN_POOL: u32 = 2;

/// Pause between two attempts to open a database that is unavailable.
pub(crate) const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Command line settings of a service with a database.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Database")]
pub struct DatabaseArgs {
    /// URL of the database: postgres://USER:PASSWORD@HOST/DATABASE, or sqlite:///PATH for a service
    /// without replicas
    #[arg(long, env = "GANTRY_DATABASE_URL", value_name = "URL", hide_env_values = true, value_parser = url)]
    database_url: String,
    /// PostgreSQL: schema of the service's tables. A missing schema is created. Default: the
    /// default schema of the server
    #[arg(long, env = "GANTRY_DATABASE_SCHEMA", value_name = "NAME", value_parser = schema)]
    database_schema: Option<String>,
    /// PostgreSQL: maximum number of connections of this process
    #[arg(
        long,
        env = "GANTRY_DATABASE_CONNECTIONS",
        value_name = "COUNT",
        default_value_t = DEFAULT_CONNECTIONS,
        value_parser = clap::value_parser!(u32).range(3..=1000)
    )]
    database_connections: u32,
}

impl DatabaseArgs {
    /// Returns the database settings.
    #[must_use]
    pub fn settings(&self, migrate: bool, wait: bool) -> Settings {
        Settings {
            url: self.database_url.clone(),
            schema: self.database_schema.clone(),
            connections: self.database_connections,
            reserved: 0,
            migrate,
            wait,
        }
    }

    /// Checks that the settings can be used together.
    pub fn check(&self) -> Result<(), crate::ConnectError> {
        if self.database_schema.is_some() && self.database_url.starts_with("sqlite:") {
            return Err(crate::ConnectError::SchemaUnsupported);
        }
        Ok(())
    }
}

fn url(text: &str) -> Result<String, String> {
    let known = ["postgres://", "postgresql://", "sqlite:"].iter().any(|scheme| text.starts_with(scheme));
    if known { Ok(text.to_owned()) } else { Err("use postgres://… or sqlite:///path".to_owned()) }
}

/// Parses the name of a schema. Only names that need no quotes are accepted, so that operators can
/// write them alike everywhere.
fn schema(text: &str) -> Result<String, String> {
    let valid_start = text.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
    let valid = text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if valid_start && valid && text.len() <= 63 && !text.starts_with("pg_") {
        Ok(text.to_owned())
    } else {
        Err("use at most 63 lower-case letters, digits and underscores; do not start with a digit or pg_"
            .to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sqlite_url_is_percent_decoded() {
        for path in
            ["/a b/c.db", "/a%41b/c.db", "/why?/c.db", r"/back\slash/c.db", "/100%/c.db", "/%zz/%", "/ä%2"]
        {
            let url = sqlite_url(path);
            assert_eq!(sqlite_path(&url).as_deref(), Some(path), "{url}");
            assert_eq!(sqlite_path(&format!("{url}?mode=rwc")).as_deref(), Some(path), "{url}");
        }
        assert_eq!(sqlite_path("sqlite:/a%20b").as_deref(), Some("/a b"));
        assert_eq!(sqlite_path("postgres://x/y"), None);
    }
}
