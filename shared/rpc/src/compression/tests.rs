use super::*;
use crate::pb::runtime::{Entry, ExtentData};

fn chunk(data: Vec<u8>) -> Chunk {
    Chunk { extents: vec![ExtentData { ordinal: 3, data: data.into() }] }
}

/// Text that shrinks.
fn text(bytes: usize) -> Vec<u8> {
    b"some text that repeats ".iter().copied().cycle().take(bytes).collect()
}

/// Bytes that do not shrink: a hash in counter mode.
fn noise(bytes: usize) -> Vec<u8> {
    let mut noise = vec![0; bytes];
    blake3::Hasher::new().finalize_xof().fill(&mut noise);
    noise
}

/// Compresses `plain` into a frame, at the default level.
fn frame(plain: &[u8]) -> Bytes {
    zstd::bulk::compress(plain, 0).expect("compressed").into()
}

#[tokio::test]
async fn compressed_message_is_decoded_unchanged() {
    let message = chunk(text(1 << 20));
    let mut zstd = Compressor::new(LEVEL).expect("a compressor");
    let frame = compress(&mut zstd, &message).expect("it shrinks");
    assert!(frame.len() < 10_000, "{}", frame.len());
    assert_eq!(decode::<Chunk>(frame).await.expect("decoded"), message);
}

#[test]
fn message_that_does_not_shrink_is_sent_raw() {
    let mut zstd = Compressor::new(LEVEL).expect("a compressor");
    assert_eq!(compress(&mut zstd, &chunk(noise(1 << 20))), None);
    assert_eq!(compress(&mut zstd, &chunk(text(MIN_BYTES / 2))), None, "it is too small");
    let entries = |count| ManifestPart { entries: vec![Entry::default(); count], more: false };
    assert!(matches!(pack_part(entries(10)), RawOrZstd::Raw(part) if part == entries(10)));
    assert!(matches!(pack_part(entries(10_000)), RawOrZstd::Zstd(_)));
}

#[tokio::test]
async fn malformed_frame_is_rejected() {
    let plain = chunk(text(100_000)).encode_to_vec();
    let whole = frame(&plain);
    // A frame of a stream does not state its content size.
    let unsized_frame = zstd::encode_all(&plain[..], 0).expect("compressed");
    // The size is in the four bytes after the magic number and the descriptor.
    let mut understated = whole.to_vec();
    assert_eq!(understated[4] >> 6, 2, "the size has four bytes");
    understated[5..9].copy_from_slice(&1000_u32.to_le_bytes());
    let huge = zstd::bulk::compress(&vec![0; (4 << 20) + 1], 0).expect("compressed");

    let refused = async |frame: Vec<u8>| decode::<Chunk>(frame.into()).await.expect_err("it is malformed");
    assert!(matches!(refused(Vec::new()).await, InvalidFrame::Header));
    assert!(matches!(refused(b"no frame at all".to_vec()).await, InvalidFrame::Header));
    assert!(matches!(refused(unsized_frame).await, InvalidFrame::Header));
    assert!(matches!(refused(huge).await, InvalidFrame::TooLarge));
    assert!(matches!(refused(understated).await, InvalidFrame::Content));
    assert!(matches!(refused(whole[..whole.len() / 2].to_vec()).await, InvalidFrame::Content));
    assert!(matches!(refused(frame(b"\xff\xff\xff").to_vec()).await, InvalidFrame::Message(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn packer_compresses_only_if_permitted() {
    for may_compress in [false, true] {
        let (queue, mut messages) = mpsc::channel(4);
        let sending = tokio::task::spawn_blocking(move || {
            Packer::new(may_compress).send(&queue, chunk(text(100_000)), |packed| packed)
        });
        let sent = sending.await.expect("no panic").expect("there is a receiver");
        assert_eq!(sent.content, 100_000);
        match messages.recv().await {
            Some(RawOrZstd::Raw(raw)) if !may_compress => {
                assert_eq!((raw, sent.wire), (chunk(text(100_000)), 100_000));
            }
            Some(RawOrZstd::Zstd(frame)) if may_compress => assert_eq!(sent.wire, frame.len() as u64),
            other => panic!("{may_compress}: {other:?}"),
        }
    }
}
