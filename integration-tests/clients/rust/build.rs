//! Generates the client from `proto/`.

use std::path::{Path, PathBuf};

use prost::Message;

const PROTO: &str = "../../../proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut protos = Vec::new();
    collect(Path::new(PROTO), &mut protos)?;
    let descriptors = protox::compile(&protos, [PROTO])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .build_server(false)
        .include_file("protos.rs")
        .compile_fds(descriptors)?;
    println!("cargo:rerun-if-changed={PROTO}");
    Ok(())
}

fn collect(directory: &Path, protos: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, protos)?;
        } else if path.extension().is_some_and(|extension| extension == "proto") {
            protos.push(path);
        }
    }
    Ok(())
}
