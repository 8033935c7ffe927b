//! Where the randomness of an example comes from.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

use crate::Split;

/// The generator of one example: `purpose` (a tag that each use of randomness has to itself), seed,
/// split and set are the cipher's key and `index` is its nonce. So no example depends on what was
/// drawn before it.
pub(crate) fn example_rng(
    purpose: [u8; 8],
    seed: u64,
    split: Split,
    set: usize,
    index: u64,
) -> ChaCha8Rng {
    let words = [u64::from_le_bytes(purpose), seed, split as u64, set as u64];
    let mut key = [0; 32];
    for (bytes, word) in key.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(index);
    rng
}
