//! The suite as its users meet it: the `gantry` binary, a cluster of its own for each test, and what is on the machine afterwards.

pub mod snapshot;
pub mod tree;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// How long a condition may take to come true before a test has failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether this process may run containers. Says so when it may not.
#[must_use]
pub fn may_run_containers() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("not applicable: this process is not root");
    }
    root
}

/// The `gantry` binary of this build.
#[must_use]
pub fn gantry_binary() -> PathBuf {
    if let Some(path) = std::env::var_os("GANTRY_BINARY") {
        return path.into();
    }
    let test = std::env::current_exe().expect("the path of this test");
    let path = test.ancestors().nth(2).expect("target/debug/deps").join("gantry");
    assert!(path.exists(), "{} is missing: build the workspace's binaries first", path.display());
    path
}

/// Waits until `condition` answers something.
pub fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what} did not come true");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A local cluster with directories of its own, which is started by the first command and stopped when this is dropped.
pub struct Cluster {
    home: TempDir,
    settings: Vec<(String, String)>,
}

impl Default for Cluster {
    fn default() -> Self {
        Self::new()
    }
}

impl Cluster {
    /// Not started yet.
    #[must_use]
    pub fn new() -> Self {
        let home = tempfile::Builder::new().prefix("gantry-it-").tempdir().expect("a temporary directory");
        std::fs::create_dir(home.path().join("run")).expect("a runtime directory");
        Self { home, settings: Vec::new() }
    }

    /// With a setting in the environment of every command, and so of the cluster.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// A directory for the test's own files.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// Where the cluster keeps its state.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.home.path().join("state/gantry")
    }

    /// A command line, with no standard input.
    pub fn gantry<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(gantry_binary());
        command
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("HOME", self.home.path())
            .env("XDG_STATE_HOME", self.home.path().join("state"))
            .env("XDG_RUNTIME_DIR", self.home.path().join("run"))
            .env("GANTRY_IDLE_END", "10m")
            .envs(self.settings.iter().map(|(name, value)| (name, value)))
            .current_dir(self.home.path())
            .stdin(Stdio::null());
        command
    }

    /// Runs a command line to its end.
    pub fn output<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Output {
        self.gantry(arguments).output().expect("gantry runs")
    }

    /// Runs a command line that must succeed, and answers its standard output.
    pub fn succeed<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Vec<u8> {
        let output = self.output(arguments);
        assert!(output.status.success(), "{}", describe(&output));
        output.stdout
    }

    /// The cluster's process. `None`: none runs.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        let status = self.output(["status", "--json"]);
        let status: serde_json::Value = serde_json::from_slice(status.stdout.trim_ascii()).ok()?;
        i32::try_from(status.get("process_id")?.as_i64()?).ok()
    }

    /// Kills the cluster's process without warning.
    pub fn kill(&self) {
        let pid = self.pid().expect("a running cluster");
        // SAFETY: kill has no memory to be unsafe about.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
        wait_for("the end of the cluster", || {
            (!Path::new("/proc").join(pid.to_string()).exists()).then_some(())
        });
    }

    /// What `list KIND` answers.
    #[must_use]
    pub fn list(&self, kind: &str) -> Vec<serde_json::Value> {
        let output = self.succeed(["list", kind, "--json"]);
        let lines = output.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines.map(|line| serde_json::from_slice(line).expect("a JSON object a line")).collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let down = self.output(["down", "--force"]);
        if std::thread::panicking() {
            if let Ok(log) = std::fs::read_to_string(self.state().join("cluster.log")) {
                eprintln!("--- the cluster's log ---\n{log}");
            }
            eprintln!("--- down ---\n{}", describe(&down));
        }
    }
}

/// How a command ended and what it said, for failures.
#[must_use]
pub fn describe(output: &Output) -> String {
    format!(
        "{}\n--- stdout ---\n{}\n--- stderr ---\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// The exit code; fails on a signal.
#[must_use]
pub fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("no exit code: {}", describe(output)))
}
