//! A registry of container images with TLS and a password, and images that the tests build.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::wait_for;

/// User name of every registry.
pub const USER: &str = "ann";
/// Password of every registry.
pub const PASSWORD: &str = "secret of ann";

/// Handling of connections by a registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// TLS and a password.
    Guarded,
    /// Neither TLS nor a password.
    Open,
}

/// A running registry on the loopback.
pub struct Registry {
    process: Child,
    home: TempDir,
    access: Access,
    port: u16,
}

fn run(directory: &Path, program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).current_dir(directory).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

impl Registry {
    /// Starts a registry without images.
    #[must_use]
    pub fn start(access: Access) -> Self {
        let home = TempDir::new().expect("a directory");
        let path = home.path();
        // A free port, which another process could take only in this moment.
        let port = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port").port();
        let mut settings = format!(
            "version: 0.1\nlog: {{accesslog: {{disabled: false}}, level: info}}\nstorage: {{filesystem: {{rootdirectory: {path}/images}}}}\nhttp:\n  addr: 127.0.0.1:{port}\n",
            path = path.display()
        );
        if access == Access::Guarded {
            certify(path);
            run(path, "htpasswd", &["-Bbc", "htpasswd", USER, PASSWORD]);
            settings += &format!(
                "  tls: {{certificate: {path}/cert.pem, key: {path}/key.pem}}\nauth: {{htpasswd: {{realm: test, path: {path}/htpasswd}}}}\n",
                path = path.display()
            );
        }
        fs::write(path.join("settings.yml"), settings).expect("written");
        let log = fs::File::create(path.join("log")).expect("a log");
        let process = Command::new("docker-registry")
            .args(["serve", "settings.yml"])
            .current_dir(path)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log)
            .spawn()
            .expect("docker-registry, from the package of this name");
        let registry = Self { process, home, access, port };
        wait_for("the start of the registry", || {
            std::net::TcpStream::connect(("127.0.0.1", port)).ok().map(drop)
        });
        registry
    }

    /// Returns the reference of an image, such as `app:1`, in this registry.
    #[must_use]
    pub fn reference(&self, image: &str) -> String {
        format!("localhost:{}/{image}", self.port)
    }

    /// Returns the port of the registry.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the file with the certificate that has signed the one of the registry.
    #[must_use]
    pub fn ca(&self) -> PathBuf {
        self.home.path().join("ca.pem")
    }

    /// Returns the directory with the images.
    #[must_use]
    pub fn storage(&self) -> PathBuf {
        self.home.path().join("images")
    }

    /// Returns a Docker configuration with a password for this registry.
    #[must_use]
    pub fn docker_config(&self, password: &str) -> String {
        use std::io::Write as _;
        let mut encoder = Command::new("openssl")
            .args(["base64", "-A"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("openssl");
        write!(encoder.stdin.take().expect("a pipe"), "{USER}:{password}").expect("written");
        let encoded = encoder.wait_with_output().expect("openssl").stdout;
        let encoded = String::from_utf8(encoded).expect("text");
        format!(r#"{{"auths": {{"localhost:{}": {{"auth": "{encoded}"}}}}}}"#, self.port)
    }

    /// Pushes an image of a layout.
    pub fn push(&self, layout: &Layout, from: &str, image: &str) {
        let to = format!("docker://{}", self.reference(image));
        let credentials = format!("{USER}:{PASSWORD}");
        let mut arguments = vec!["copy", "--quiet", "--dest-tls-verify=false"];
        if self.access == Access::Guarded {
            arguments.extend(["--dest-creds", &credentials]);
        }
        let from = format!("oci:oci:{from}");
        arguments.extend([from.as_str(), to.as_str()]);
        run(layout.home.path(), "skopeo", &arguments);
    }

    /// Returns the number of requests whose line in the log contains `text`.
    #[must_use]
    pub fn requests(&self, text: &str) -> usize {
        let log = fs::read_to_string(self.home.path().join("log")).expect("the log");
        log.lines().filter(|line| line.contains(text) && line.contains("HTTP/")).count()
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        _ = self.process.kill();
        _ = self.process.wait();
    }
}

/// Makes a certificate for localhost, and the one that has signed it.
fn certify(path: &Path) {
    let key = ["-newkey", "rsa:2048", "-nodes"];
    let ca = ["req", "-x509", "-days", "2", "-subj", "/CN=test", "-keyout", "ca.key", "-out", "ca.pem"];
    run(path, "openssl", &[&ca[..], &key].concat());
    let request = ["req", "-subj", "/CN=localhost", "-keyout", "key.pem", "-out", "request.pem"];
    run(path, "openssl", &[&request[..], &key].concat());
    fs::write(path.join("names"), "subjectAltName=DNS:localhost").expect("written");
    let sign = ["x509", "-req", "-in", "request.pem", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"];
    run(path, "openssl", &[&sign[..], &["-days", "2", "-extfile", "names", "-out", "cert.pem"]].concat());
}

/// Images in an OCI layout.
pub struct Layout {
    home: TempDir,
}

impl Default for Layout {
    fn default() -> Self {
        Self::new()
    }
}

impl Layout {
    /// Makes a layout with the image `base`, which has no layers.
    #[must_use]
    pub fn new() -> Self {
        let home = TempDir::new().expect("a directory");
        run(home.path(), "umoci", &["init", "--layout", "oci"]);
        run(home.path(), "umoci", &["new", "--image", "oci:base"]);
        Self { home }
    }

    /// Returns the directory of the layout.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.home.path().join("oci")
    }

    /// Makes the image `to` of the image `from` and a layer with changes. `change` changes the
    /// directory of the root file system.
    pub fn layer(&self, from: &str, to: &str, change: impl FnOnce(&Path)) {
        let path = self.home.path();
        run(path, "umoci", &["unpack", "--image", &format!("oci:{from}"), "bundle"]);
        change(&path.join("bundle/rootfs"));
        run(path, "umoci", &["repack", "--image", &format!("oci:{to}"), "bundle"]);
        fs::remove_dir_all(path.join("bundle")).expect("removed");
    }

    /// Changes the configuration of an image.
    pub fn configure(&self, image: &str, options: &[&str]) {
        let image = format!("oci:{image}");
        run(self.home.path(), "umoci", &[&["config", "--image", &image], options].concat());
    }

    /// Makes an archive of an image with `skopeo`, and returns its path.
    #[must_use]
    pub fn archive(&self, image: &str, format: &str) -> PathBuf {
        let file = self.home.path().join(format!("{format}.tar"));
        let to = format!("{format}:{}:{image}:latest", file.display());
        run(self.home.path(), "skopeo", &["copy", "--quiet", &format!("oci:oci:{image}"), &to]);
        file
    }
}
