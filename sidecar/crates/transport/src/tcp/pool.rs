//! Reused buffers for received frames.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// A pool of buffers for frames, for example shared by a port's connections. A new buffer for every frame would have to be zeroed and loaded
/// into the caches.
#[derive(Clone, Default)]
pub struct Pool(Arc<Mutex<Vec<Vec<u8>>>>);

/// The bytes of a frame. The buffer returns to the pool when the last reference is dropped.
struct PooledFrame {
    memory: Vec<u8>,
    bytes: usize,
    pool: Pool,
}

impl Pool {
    /// Takes a buffer of at least `bytes` bytes. Its contents are unspecified.
    #[must_use]
    pub fn take(&self, bytes: usize) -> Vec<u8> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match kept.iter().rposition(|memory| memory.len() >= bytes) {
            Some(place) => kept.swap_remove(place),
            None => vec![0; bytes],
        }
    }

    /// Turns the first `bytes` bytes of a buffer into a frame.
    #[must_use]
    pub fn freeze(&self, memory: Vec<u8>, bytes: usize) -> Bytes {
        Bytes::from_owner(PooledFrame { memory, bytes, pool: self.clone() })
    }

    /// Returns a buffer; a full pool keeps the largest ones.
    fn put(&self, memory: Vec<u8>) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < POOLED_BUFFERS_MAX {
            kept.push(memory);
        } else if let Some(smallest) = kept.iter_mut().min_by_key(|memory| memory.len())
            && smallest.len() < memory.len()
        {
            *smallest = memory;
        }
    }
}

impl AsRef<[u8]> for PooledFrame {
    fn as_ref(&self) -> &[u8] {
        &self.memory[..self.bytes]
    }
}

impl Drop for PooledFrame {
    fn drop(&mut self) {
        self.pool.put(std::mem::take(&mut self.memory));
    }
}

/// Limit for pooled buffers. Each is at most as long as a chunk, so together they have at most 16 MiB.
const POOLED_BUFFERS_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back() {
        let pool = Pool::default();
        let mut memory = pool.take(100);
        memory.fill(7);
        let frame = pool.freeze(memory, 90);
        let part = frame.slice(10..20);
        assert_eq!(frame[..], [7; 90]);
        drop(frame);
        // A reference to a slice keeps the buffer out of the pool.
        assert_eq!(pool.take(50), [0; 50]);
        drop(part);
        assert_eq!(pool.take(101), [0; 101]);
        assert_eq!(pool.take(60), [7; 100]);
    }

    #[test]
    fn the_largest_are_kept() {
        let pool = Pool::default();
        for length in 1..=POOLED_BUFFERS_MAX + 2 {
            pool.put(vec![1; length]);
        }
        assert_eq!(pool.0.lock().expect("nobody panics").len(), POOLED_BUFFERS_MAX);
        assert_eq!(pool.take(POOLED_BUFFERS_MAX + 2).len(), POOLED_BUFFERS_MAX + 2);
        assert_eq!(pool.take(POOLED_BUFFERS_MAX + 1).len(), POOLED_BUFFERS_MAX + 1);
        assert_eq!(pool.take(POOLED_BUFFERS_MAX + 1), vec![0; POOLED_BUFFERS_MAX + 1]);
    }
}
