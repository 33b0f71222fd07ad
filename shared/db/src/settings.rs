//! Where a service's database is, and how it is used.

use std::path::PathBuf;
use std::time::Duration;

/// Where a database is, and how it is used.
#[derive(Debug, Clone)]
pub struct Settings {
    /// `postgres://…`, or `sqlite:///path`, made when it is missing.
    pub url: String,
    /// On PostgreSQL: the schema that everything is kept in, made when it is missing. `None`: as the server has it, `public` as a rule.
    pub schema: Option<String>,
    /// On PostgreSQL: how many connections at most.
    pub connections: u32,
    /// Whether a database of an older program is brought to the schema of this one.
    pub migrate: bool,
    /// Whether one that does not answer is waited for.
    pub wait: bool,
}

impl<T: Into<String>> From<T> for Settings {
    fn from(url: T) -> Self {
        Self { url: url.into(), schema: None, connections: DEFAULT_CONNECTIONS, migrate: true, wait: false }
    }
}

impl Settings {
    /// The database, for people, and without what opens it.
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
    /// The file of a SQLite database.
    #[must_use]
    pub fn file(&self) -> Option<PathBuf> {
        self.path().map(PathBuf::from)
    }

    fn path(&self) -> Option<String> {
        sqlite_path(&self.url)
    }
}

/// The address of a SQLite database.
#[must_use]
pub fn sqlite_url(path: &str) -> String {
    // In an address these mean something.
    format!("sqlite://{}", path.replace('%', "%25").replace('?', "%3F"))
}

/// The path in the address of a SQLite database.
pub(crate) fn sqlite_path(url: &str) -> Option<String> {
    let path = url.split('?').next().unwrap_or_default().strip_prefix("sqlite:")?;
    Some(percent_decode(path.strip_prefix("//").unwrap_or(path)))
}

/// Replaces `%` and two hex digits by the byte that they name, as the driver does. What is no UTF-8 then is refused by the driver.
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

const DEFAULT_CONNECTIONS: u32 = 16;

/// How long the database is left alone when it did not answer.
pub(crate) const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Settings of a service that has a database.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Database")]
pub struct DatabaseArgs {
    /// Where the service keeps its rows: postgres://USER:PASSWORD@HOST/DATABASE, or sqlite:///PATH for a service that has no replica
    #[arg(long, env = "GANTRY_DATABASE_URL", value_name = "URL", hide_env_values = true, value_parser = url)]
    database_url: String,
    /// PostgreSQL: the schema of its own that the service keeps its rows in, made when it is missing. Default: as the server has it
    #[arg(long, env = "GANTRY_DATABASE_SCHEMA", value_name = "NAME", value_parser = schema)]
    database_schema: Option<String>,
    /// PostgreSQL: connections at most
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
    /// What they say.
    #[must_use]
    pub fn settings(&self, migrate: bool, wait: bool) -> Settings {
        Settings {
            url: self.database_url.clone(),
            schema: self.database_schema.clone(),
            connections: self.database_connections,
            migrate,
            wait,
        }
    }

    /// Refuses what cannot be used together.
    pub fn check(&self) -> Result<(), crate::ConnectError> {
        if self.database_schema.is_some() && self.database_url.starts_with("sqlite:") {
            return Err(crate::ConnectError::SchemaUnsupported);
        }
        Ok(())
    }
}

fn url(text: &str) -> Result<String, String> {
    let known = ["postgres://", "postgresql://", "sqlite:"].iter().any(|scheme| text.starts_with(scheme));
    if known { Ok(text.to_owned()) } else { Err("write postgres://… or sqlite:///path".to_owned()) }
}

/// Names that need no quotes, so that they are the same wherever an operator writes them.
fn schema(text: &str) -> Result<String, String> {
    let begins = text.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
    let goes_on = text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if begins && goes_on && text.len() <= 63 && !text.starts_with("pg_") {
        Ok(text.to_owned())
    } else {
        Err("write lower-case letters, digits and underscores, no digit in front and no pg_".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_of_sqlite_address_is_decoded() {
        for path in
            ["/a b/c.db", "/a%41b/c.db", "/what?/c.db", r"/back\slash/c.db", "/100%/c.db", "/%zz/%", "/ä%2"]
        {
            let url = sqlite_url(path);
            assert_eq!(sqlite_path(&url).as_deref(), Some(path), "{url}");
            assert_eq!(sqlite_path(&format!("{url}?mode=rwc")).as_deref(), Some(path), "{url}");
        }
        assert_eq!(sqlite_path("sqlite:/a%20b").as_deref(), Some("/a b"));
        assert_eq!(sqlite_path("postgres://x/y"), None);
    }
}
