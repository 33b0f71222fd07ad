//! Databases for tests: SQLite files, and databases on a PostgreSQL server that runs as long as the
//! test process.
//!
//! The server comes from the installed PostgreSQL (`pg_config --bindir`). It uses a temporary
//! directory and a free loopback port, without fsync. The parent-death signal ends it with the
//! process that started it.

use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use sea_orm::ConnectionTrait;
use tempfile::TempDir;
use tokio::sync::OnceCell;

/// User id of the server. PostgreSQL refuses to run as root.
const UNPRIVILEGED_ID: u32 = 65534;

/// Free memory, in bytes, from which databases are kept in memory.
const PLENTY: u64 = 6 << 30;

static SERVER: OnceCell<u16> = OnceCell::const_new();
static NEXT: AtomicU32 = AtomicU32::new(0);

/// A new, empty database. The value must be kept while the database is used.
pub struct TestDatabase {
    /// The URL for `db::Database::connect`.
    pub url: String,
    _directory: Option<TempDir>,
}

impl TestDatabase {
    /// Copies the database, like a backup. No connection may write meanwhile.
    pub async fn copy(&self) -> Self {
        if self.url.starts_with("sqlite://") {
            let copy = sqlite();
            let to = copy.url.strip_prefix("sqlite://").expect("a file");
            // Not a copy of the files: a connection that is being closed moves the last writes from
            // one file to another.
            let connection = sea_orm::Database::connect(&self.url).await.expect("the file opens");
            connection.execute_unprepared(&format!("VACUUM INTO '{to}'")).await.expect("copy a database");
            connection.close().await.expect("close");
            return copy;
        }
        let (_, from) = self.url.rsplit_once('/').expect("a database");
        let deadline = Instant::now() + Duration::from_secs(30);
        let port = SERVER.get_or_init(start_server).await;
        let admin = sea_orm::Database::connect(url(*port, "postgres")).await.expect("the server answers");
        let name = format!("test_{}", NEXT.fetch_add(1, Ordering::Relaxed));
        // Closed connections may still exist for a moment.
        while let Err(error) =
            admin.execute_unprepared(&format!("CREATE DATABASE {name} TEMPLATE {from}")).await
        {
            assert!(Instant::now() < deadline, "cannot copy {from}: {error}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        admin.close().await.expect("close");
        Self { url: url(*port, &name), _directory: None }
    }
}

/// The directory for databases: in memory, if enough is free, because tests mostly wait for the
/// disk.
fn place() -> PathBuf {
    let memory = Path::new("/dev/shm");
    let has_plenty = rustix::fs::statvfs(memory).is_ok_and(|found| found.f_bavail * found.f_frsize >= PLENTY);
    if has_plenty { memory.to_owned() } else { std::env::temp_dir() }
}

/// Creates a SQLite file.
#[must_use]
pub fn sqlite() -> TestDatabase {
    let directory = tempfile::tempdir_in(place()).expect("a temporary directory");
    TestDatabase {
        url: format!("sqlite://{}/test.db", directory.path().display()),
        _directory: Some(directory),
    }
}

/// Creates a database on the PostgreSQL server of this process.
pub async fn postgres() -> TestDatabase {
    let port = SERVER.get_or_init(start_server).await;
    let name = format!("test_{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let admin = sea_orm::Database::connect(url(*port, "postgres")).await.expect("the server answers");
    admin.execute_unprepared(&format!("CREATE DATABASE {name}")).await.expect("a new database");
    admin.close().await.expect("close");
    TestDatabase { url: url(*port, &name), _directory: None }
}

fn url(port: u16, database: &str) -> String {
    format!("postgres://postgres@127.0.0.1:{port}/{database}")
}

async fn start_server() -> u16 {
    let port = tokio::task::spawn_blocking(|| {
        let (ready, started) = mpsc::sync_channel(1);
        // The parent-death signal fires when this thread ends, so it lives as long as the process.
        std::thread::spawn(move || {
            let (port, mut server) = spawn_server();
            ready.send(port).expect("the test waits");
            let ended = server.wait();
            eprintln!("PostgreSQL ended: {ended:?}");
        });
        started.recv().expect("PostgreSQL starts")
    })
    .await
    .expect("no panic");

    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match sea_orm::Database::connect(url(port, "postgres")).await {
            Ok(connection) => {
                connection.close().await.expect("close");
                return port;
            }
            Err(error) if Instant::now() > deadline => panic!("cannot connect to PostgreSQL: {error}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

fn spawn_server() -> (u16, Child) {
    let bin = binaries();
    remove_stale();
    let root = place().join(format!("gantry-test-postgres-{}", std::process::id()));
    std::fs::create_dir_all(&root).expect("a directory for PostgreSQL");
    initialize(&bin, &root);
    let port = free_port();
    let fast = ["-F", "-c", "synchronous_commit=off", "-c", "full_page_writes=off"];
    (port, spawn(&bin, &root, port, &fast))
}

/// The directory of the PostgreSQL programs.
fn binaries() -> PathBuf {
    let bin =
        Command::new("pg_config").arg("--bindir").output().ok().filter(|output| output.status.success());
    let bin = bin.map(|output| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()));
    bin.filter(|bin| bin.join("initdb").exists()).unwrap_or_else(newest_server)
}

fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions.
    unsafe { libc::geteuid() == 0 }
}

/// A command for a PostgreSQL program, which must not run as root.
fn unprivileged(program: PathBuf) -> Command {
    let mut command = Command::new(program);
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if is_root() {
        command.uid(UNPRIVILEGED_ID).gid(UNPRIVILEGED_ID);
    }
    command
}

/// Initializes a server in the directory `root`.
fn initialize(bin: &Path, root: &Path) {
    std::fs::set_permissions(root, std::fs::Permissions::from_mode(0o700)).expect("chmod");
    if is_root() {
        chown(root, Some(UNPRIVILEGED_ID), Some(UNPRIVILEGED_ID)).expect("chown");
    }
    let mut initdb = unprivileged(bin.join("initdb"));
    initdb.args(["--no-sync", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "-D"]);
    assert!(initdb.arg(root.join("data")).status().expect("initdb runs").success(), "initdb failed");
}

/// Starts a server that ends with the calling thread.
fn spawn(bin: &Path, root: &Path, port: u16, more: &[&str]) -> Child {
    let mut server = unprivileged(bin.join("postgres"));
    server.arg("-D").arg(root.join("data")).args(["-p", &port.to_string()]).args(more);
    let sockets = format!("unix_socket_directories={}", root.display());
    for setting in ["listen_addresses=127.0.0.1", "max_connections=300", &sockets] {
        server.args(["-c", setting]);
    }
    // SAFETY: prctl is async-signal-safe, and nothing else is done between fork and exec.
    unsafe {
        server.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGQUIT) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    server.spawn().expect("postgres runs")
}

/// A separate, durable PostgreSQL server that can be stopped and started again. It ends when the
/// value is dropped or when the starting thread ends.
pub struct Server {
    bin: PathBuf,
    root: TempDir,
    port: u16,
    server: Option<Child>,
}

impl Server {
    /// Creates a server, and waits until it answers.
    #[must_use]
    pub fn new() -> Self {
        Self::new_in(&std::env::temp_dir())
    }

    /// Creates a server whose data is in `directory`, and waits until it answers.
    #[must_use]
    pub fn new_in(directory: &Path) -> Self {
        let root = tempfile::Builder::new().prefix("gantry-postgres-").tempdir_in(directory);
        let root = root.expect("a directory");
        let bin = binaries();
        initialize(&bin, root.path());
        let mut server = Self { bin, root, port: free_port(), server: None };
        server.start();
        server
    }

    /// Starts a stopped server, and waits until it answers.
    pub fn start(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        self.server = Some(spawn(&self.bin, self.root.path(), self.port, &[]));
        while !self.asked("SELECT 1").status().expect("psql runs").success() {
            assert!(Instant::now() < deadline, "cannot connect to PostgreSQL");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Whether the server has ended without a request. It can then be started again.
    pub fn has_ended(&mut self) -> bool {
        let ended = self.server.as_mut().is_some_and(|server| server.try_wait().expect("wait").is_some());
        if ended {
            self.server = None;
        }
        ended
    }

    /// Stops the server without waiting for its clients.
    pub fn stop(&mut self) {
        self.end_with(libc::SIGINT);
    }

    /// Kills the server. The next start recovers the data.
    pub fn crash(&mut self) {
        self.end_with(libc::SIGQUIT);
    }

    /// Freezes the server with all its processes. Connections stay open, and nothing answers.
    pub fn freeze(&self) {
        self.signal_all(libc::SIGSTOP);
    }

    /// Continues a frozen server.
    pub fn thaw(&self) {
        self.signal_all(libc::SIGCONT);
    }

    fn signal_all(&self, signal: libc::c_int) {
        let main = self.server.as_ref().expect("the server runs").id();
        let main = libc::pid_t::try_from(main).expect("a pid");
        let processes = std::fs::read_dir("/proc").expect("processes").flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        // The parent is the second field after the name, which is in parentheses.
        let is_own = |pid: &libc::pid_t| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
            *pid == main || parent == Some(main.to_string().as_str())
        };
        for pid in pids.filter(is_own) {
            // SAFETY: kill accesses no memory. A process of the server may have ended.
            unsafe { libc::kill(pid, signal) };
        }
    }

    fn end_with(&mut self, signal: libc::c_int) {
        if let Some(mut server) = self.server.take() {
            let pid = libc::pid_t::try_from(server.id()).expect("a pid");
            // SAFETY: kill accesses no memory.
            assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
            server.wait().expect("it ends");
        }
    }

    /// The database `postgres`, as its superuser.
    #[must_use]
    pub fn database(&self) -> TestDatabase {
        TestDatabase { url: self.url("postgres"), _directory: None }
    }

    /// Executes SQL as superuser in the database `postgres`.
    pub fn execute(&self, sql: &str) {
        let mut psql = self.asked(sql);
        let output = psql.stderr(Stdio::piped()).output().expect("psql runs");
        assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Returns the result rows of a query, one per line, as superuser in the database `postgres`.
    #[must_use]
    pub fn query(&self, sql: &str) -> Vec<String> {
        self.try_query(sql).unwrap_or_else(|why| panic!("{sql}: {why}"))
    }

    /// Returns the result rows of a query, one per line. The error is the message of `psql`, for
    /// example after a timeout.
    pub fn try_query(&self, sql: &str) -> Result<Vec<String>, String> {
        let mut psql = self.asked(sql);
        psql.args(["-A", "-t"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        psql.env("PGCONNECT_TIMEOUT", "5").env("PGOPTIONS", "-c statement_timeout=10s");
        let output = psql.output().map_err(|error| format!("psql: {error}"))?;
        let text = |said: &[u8]| String::from_utf8_lossy(said).into_owned();
        if !output.status.success() {
            return Err(text(&output.stderr));
        }
        Ok(text(&output.stdout).lines().map(str::to_owned).collect())
    }

    /// The URL for `db::Settings`, for `user` in the database `postgres`.
    #[must_use]
    pub fn url(&self, user: &str) -> String {
        format!("postgres://{user}@127.0.0.1:{}/postgres", self.port)
    }

    fn asked(&self, sql: &str) -> Command {
        let mut psql = unprivileged(self.bin.join("psql"));
        psql.args(["-X", "-v", "ON_ERROR_STOP=1", "-h", "127.0.0.1", "-U", "postgres", "-d", "postgres"]);
        psql.args(["-p", &self.port.to_string(), "-c", sql]);
        psql
    }
}

impl Default for Server {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The directory of the newest installed server on Debian.
fn newest_server() -> PathBuf {
    let mut found: Vec<_> = std::fs::read_dir("/usr/lib/postgresql")
        .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path().join("bin"))).collect())
        .unwrap_or_default();
    found.sort();
    found.pop().expect("a PostgreSQL server: install the package `postgresql`")
}

/// Removes the directories of earlier test processes that have ended.
fn remove_stale() {
    let Ok(entries) = std::fs::read_dir(place()) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix("gantry-test-postgres-"));
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            std::fs::remove_dir_all(entry.path()).ok();
        }
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    listener.local_addr().expect("its number").port()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_returns_rows() {
        assert_eq!(Server::new().query("VALUES (1), (2)"), ["1", "2"]);
    }

    #[tokio::test]
    async fn each_database_is_fresh() {
        for _ in 0..2 {
            for database in [sqlite(), postgres().await] {
                let url = format!(
                    "{}{}",
                    database.url,
                    if database.url.starts_with("sqlite") { "?mode=rwc" } else { "" }
                );
                let connection = sea_orm::Database::connect(url).await.expect("connect");
                connection
                    .execute_unprepared("CREATE TABLE fresh (n BIGINT)")
                    .await
                    .expect("the table does not exist yet");
            }
        }
    }
}
