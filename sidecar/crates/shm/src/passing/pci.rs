//! [`PciAddress`]: how both sides of `mem.sock` name a GPU.

use std::fmt;
use std::str::FromStr;

use crate::error::ProtocolError;

/// The place of a device on the PCI bus. Processes number the devices that they see, so numbers do not name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl FromStr for PciAddress {
    type Err = ProtocolError;

    /// Parses `0000:01:00.0`, as drivers write it.
    fn from_str(text: &str) -> Result<Self, ProtocolError> {
        let parts = text.split_once(':').and_then(|(domain, rest)| {
            let (bus, rest) = rest.split_once(':')?;
            let (device, function) = rest.split_once('.')?;
            Some((domain, bus, device, function))
        });
        let (domain, bus, device, function) = parts.ok_or(WRONG)?;
        Ok(Self { domain: hexadecimal(domain)?, bus: byte(bus)?, device: byte(device)?, function: byte(function)? })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(formatter, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

fn hexadecimal(digits: &str) -> Result<u32, ProtocolError> {
    let is_plain = !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    u32::from_str_radix(digits, 16).ok().filter(|_| is_plain).ok_or(WRONG)
}

fn byte(digits: &str) -> Result<u8, ProtocolError> {
    u8::try_from(hexadecimal(digits)?).map_err(|_| WRONG)
}

const WRONG: ProtocolError = ProtocolError::Number { what: "PCI address" };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_of_a_domain_are_one_address() {
        let short: PciAddress = "0000:C1:00.0".parse().expect("as the driver writes it");
        assert_eq!("00000000:c1:00.0".parse(), Ok(short));
        assert_eq!(short.to_string(), "0000:c1:00.0");
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "0000:01:00", "0000:01.0", "0000:+1:00.0", "0000:100:00.0", "0000:01:00.", "0000:01:00.0.0"] {
            assert_eq!(text.parse::<PciAddress>(), Err(WRONG), "{text}");
        }
    }
}
