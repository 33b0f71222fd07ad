//! Databases for tests: a SQLite file, and a database on a real PostgreSQL server that lives as long as the test process.
//!
//! The server is the machine's own (`pg_config --bindir`), in a temporary directory, on a free port of the loopback, without
//! fsync. It dies with the process that started it, by the parent-death signal.

use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use sea_orm::ConnectionTrait;
use tempfile::TempDir;
use tokio::sync::OnceCell;

/// An unprivileged user: PostgreSQL refuses to run as root.
const NOBODY: u32 = 65534;

static SERVER: OnceCell<u16> = OnceCell::const_new();
static NEXT: AtomicU32 = AtomicU32::new(0);

/// A fresh, empty database. Keep it as long as it is used.
pub struct TestDatabase {
    /// What `db::Database::connect` takes.
    pub url: String,
    _directory: Option<TempDir>,
}

/// A fresh SQLite file.
#[must_use]
pub fn sqlite() -> TestDatabase {
    let directory = tempfile::tempdir().expect("a temporary directory");
    TestDatabase {
        url: format!("sqlite://{}/test.db", directory.path().display()),
        _directory: Some(directory),
    }
}

/// A fresh database on this process's PostgreSQL server.
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
        let (ready, started) = mpsc::channel();
        // The parent-death signal fires when this thread ends, so it lives as long as the process.
        std::thread::spawn(move || {
            ready.send(spawn_server()).expect("the test waits");
            loop {
                std::thread::park();
            }
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
            Err(error) if Instant::now() > deadline => panic!("PostgreSQL does not answer: {error}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

#[expect(clippy::zombie_processes, reason = "the server dies with this process, which never waits for it")]
fn spawn_server() -> u16 {
    let bin =
        Command::new("pg_config").arg("--bindir").output().ok().filter(|output| output.status.success());
    let bin = bin.map(|output| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()));
    let bin = bin.filter(|bin| bin.join("initdb").exists()).unwrap_or_else(newest_server);

    remove_stale();
    let root = std::env::temp_dir().join(format!("gantry-test-postgres-{}", std::process::id()));
    std::fs::create_dir_all(&root).expect("a directory for PostgreSQL");
    std::fs::set_permissions(&root, std::fs::Permissions::from_mode(0o700)).expect("chmod");
    let as_root = unsafe { libc::geteuid() } == 0;
    if as_root {
        chown(&root, Some(NOBODY), Some(NOBODY)).expect("chown");
    }
    let data = root.join("data");
    let unprivileged = |program: &str| {
        let mut command = Command::new(bin.join(program));
        command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if as_root {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    };

    let mut initdb = unprivileged("initdb");
    initdb.args(["--no-sync", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "-D"]).arg(&data);
    assert!(initdb.status().expect("initdb runs").success(), "initdb failed");

    let port = free_port();
    let mut server = unprivileged("postgres");
    server.arg("-D").arg(&data).arg("-F").args(["-p", &port.to_string()]);
    let sockets = format!("unix_socket_directories={}", root.display());
    for setting in [
        "listen_addresses=127.0.0.1",
        "synchronous_commit=off",
        "full_page_writes=off",
        "max_connections=300",
        &sockets,
    ] {
        server.args(["-c", setting]);
    }
    // SAFETY: prctl is async-signal-safe, and nothing else is done between fork and exec.
    unsafe {
        server.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGQUIT) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    server.spawn().expect("postgres runs");
    port
}

/// Where Debian keeps servers, the newest first.
fn newest_server() -> PathBuf {
    let mut found: Vec<_> = std::fs::read_dir("/usr/lib/postgresql")
        .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path().join("bin"))).collect())
        .unwrap_or_default();
    found.sort();
    found.pop().expect("a PostgreSQL server: install the package `postgresql`")
}

/// Removes what earlier test processes, which are gone, left behind.
fn remove_stale() {
    let Ok(entries) = std::fs::read_dir(std::env::temp_dir()) else { return };
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
                    .expect("nobody made it before");
            }
        }
    }
}
